#pragma once

// The part of mask_pack that knows segments: which of them lie in a tile, what passes their
// thresholds, and how much of each has been kept.

#include <limits>

#include "../../common/ops.h"
#include "elements.cuh"
#include "warp.cuh"

namespace dct::cuda {

constexpr int kVectorElements = 4;
constexpr int kRow = kWarpSize * kVectorElements;  // what a warp reads at once
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Those of a tile. Kernels that find them for the same elements mark the same of them as kept.
struct Segments {
  int64_t first;
  int count;  // that have elements in the tile, or lie in between; 0 where nothing is to be read
  float tau;  // of the first

  __device__ bool one() const { return count <= 1; }
  __device__ bool skipped() const { return one() && tau < 0.0f; }
  // Whether mark() does: an infinite sum passes an infinite threshold, but inf - inf is a NaN whose
  // sign machines differ about.
  __device__ bool plain() const { return one() && tau < kInfinity; }
};

// Zeros never pass: no float but zero is below the smallest subnormal. A NaN threshold passes all
// others, and a NaN passes any threshold.
__device__ inline float effective(float tau) { return fmaxf(tau, bits_to_float(1)); }

// Where segment `index` begins, within the tensor whatever the offset is.
__device__ inline int64_t segment_begin(const MaskPackArgs& args, int64_t index) {
  return min(max(args.segments[index], int64_t{0}), args.numel);
}

// By one warp.
__device__ inline Segments find_segments(const MaskPackArgs& args, int64_t begin, int64_t end) {
  const int64_t highest = args.num_segments - 1;
  if (begin >= end || highest < 0) return {0, 0, -1.0f};
  const int64_t* ends = args.segments + 1;
  const int64_t first =
      highest == 0 ? 0 : min(warp_upper_bound(ends, args.num_segments, begin), highest);
  int64_t last = first;
  if (ends[first] < end) last = min(warp_upper_bound(ends, args.num_segments, end - 1), highest);
  const float tau = args.threshold[first];
  const int64_t count = max(min(last - first + 1, int64_t{1} << 30), int64_t{1});
  return {first, static_cast<int>(count), tau < 0.0f ? tau : effective(tau)};
}

// The segment of an element, of those of its tile.
__device__ inline int64_t segment_of(const MaskPackArgs& args, const Segments& in, int64_t index) {
  return in.first + upper_bound(args.segments + 1 + in.first, in.count - 1, index);
}

// Element e of a thread's vector v is bit 4 * v + e.
template <int kVectors>
constexpr uint32_t kAllBits = 0xffffffff >> (32 - kVectors * kVectorElements);

// Which sums pass the one threshold: those of which |sum| - tau has no sign, at one addition and
// one shift each. A NaN has none. Needs gradual underflow, or what differs by a subnormal would
// pass.
template <int kVectors>
__device__ uint32_t mark(const float (&sums)[kVectors][kVectorElements], float tau) {
  uint32_t below = 0;
#pragma unroll
  for (int i = kVectors * kVectorElements - 1; i >= 0; --i) {
    const float over = __fsub_rn(fabsf(sums[i / kVectorElements][i % kVectorElements]), tau);
    below = __funnelshift_l(float_to_bits(over), below, 1);
  }
  return ~below & kAllBits<kVectors>;
}

// Which sums pass the thresholds of their segments, where a tile has several, and which belong to
// one that is skipped. `begin` is the thread's first element. Says the same of an element whichever
// others it comes with, whatever the offsets are.
template <int kVectors>
__device__ uint32_t mark_across(const MaskPackArgs& args, const Segments& in, int64_t begin,
                                const float (&sums)[kVectors][kVectorElements], uint32_t& skipped) {
  uint32_t kept = 0;
  const auto within = [&](int64_t index) {  // relative to begin, as far as this matters
    return static_cast<int>(min(max(index - begin, int64_t{-kRow}), int64_t{kVectors} * kRow));
  };
  int first = -kRow;
  for (int s = 0; s < in.count; ++s) {
    const bool ends = s + 1 == in.count;
    const int last = ends ? kVectors * kRow : within(segment_begin(args, in.first + s + 1));
    if (__any_sync(kFullWarp, first < last)) {
      const float tau = args.threshold[in.first + s], least = effective(tau);
#pragma unroll
      for (int i = 0; i < kVectors * kVectorElements; ++i) {
        const int v = i / kVectorElements, e = i % kVectorElements, at = v * kRow + e;
        const bool inside = first <= at && at < last;
        if (inside && tau < 0.0f) skipped |= 1u << i;
        if (inside && !(tau < 0.0f) && !(fabsf(sums[v][e]) < least)) kept |= 1u << i;
      }
    }
    first = last;
  }
  return kept & ~skipped;
}

// A segment's progress: kept entries << 26 | tiles counted. One atomic tells the last tile both.
constexpr int kSegmentTileBits = 26;

// Counts kept entries and tiles of 2^tile_bits elements; who reaches the segment's number of tiles
// writes `seen`. Only one does, whatever the offsets are: a count may go past the number.
__device__ inline void add_to_segment(const MaskPackArgs& args, Word* words, int64_t segment,
                                      Word kept, Word tiles, int tile_bits) {
  const Word added = kept << kSegmentTileBits | tiles;
  const Word now = atomicAdd(&words[segment], added) + added;
  if (tiles == 0) return;
  const int64_t begin = segment_begin(args, segment), end = segment_begin(args, segment + 1);
  const Word total = ((end - 1) >> tile_bits) - (begin >> tile_bits) + 1;
  const Word counted = now & ((Word{1} << kSegmentTileBits) - 1);
  if (counted < total || counted - tiles >= total) return;
  const Word seen = now >> kSegmentTileBits;
  args.seen[segment] = static_cast<int32_t>(seen < 0x7fffffff ? seen : 0x7fffffff);
}

}  // namespace dct::cuda
