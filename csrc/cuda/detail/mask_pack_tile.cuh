#pragma once

// What the two kernels of mask_pack share: where the first leaves what it finds for the second, the
// segments of a tile, and what both do with elements that are not staged.

#include <limits>

#include "../../common/ops.h"
#include "elements.cuh"
#include "range_tiles.cuh"
#include "sections.cuh"
#include "warp.cuh"

namespace dct::cuda {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kVectorElements = 4;
constexpr int kRow = kWarpSize * kVectorElements;  // what a warp reads at once
constexpr float kInfinity = std::numeric_limits<float>::infinity();
template <typename Grad>
constexpr bool kHasGrad = !std::is_same_v<Grad, NoGrad>;

// Of a warp's tile: entries kept, to be packed; entries in its slot; and rows that are done. Of the
// rows behind, nothing has been written. What is staged is the first of what passes. That is kept,
// but for sums that e3m0 cannot send: they are counted, and keep their place in the slot.
struct WarpCount {
  uint32_t kept : 12, staged : 12, rows : 8;
};

// Where entries go: a slot, or the payload.
struct Sink {
  uint16_t* positions;
  uint8_t* values;
  uint32_t room;  // for so many
  DType value_dtype;

  __device__ void put(uint32_t entry, int64_t element, uint32_t bits) const {
    positions[entry] = static_cast<uint16_t>(element % kBlock);
    store_value(values, entry, bits, value_dtype);
  }
};

// All of it is written before it is read: nothing need be cleared before a call.
struct Staging {
  int warp_tile_bits;  // log2 of a warp's tile; a block's is kWarps of them, and divides kBlock
  uint32_t room;       // entries of a slot, a multiple of 8
  Word* segments;      // [num_segments] of add_to_segment
  uint32_t* totals;    // [tiles]: kept | whether one that passes is not finite << 31
  uint32_t* unsent;    // [tiles]: those that pass and e3m0 cannot send
  WarpCount* counts;   // [tiles, kWarps]
  uint8_t* slots;      // [tiles, kWarps]: u16 positions[room], value[room]

  __device__ int warp_tile() const { return 1 << warp_tile_bits; }
  __device__ Sink slot(int64_t index, DType value_dtype) const {
    uint8_t* const entries = slots + index * room * (2 + itemsize(value_dtype));
    return {reinterpret_cast<uint16_t*>(entries), entries + 2 * room, room, value_dtype};
  }
};

// Those of a part of the tensor: with elements there, or in between.
struct Segments {
  int first, count;
  float tau;  // of the first; negative if there is none
  __device__ bool one() const { return count <= 1; }
  __device__ bool skipped() const { return one() && tau < 0.0f; }
};

// Negative thresholds skip. Zeros never pass: no float but zero is below the smallest subnormal. A
// NaN threshold passes all others, and a NaN passes any threshold.
__device__ inline float effective(float tau) {
  return tau < 0.0f ? tau : fmaxf(tau, bits_to_float(1));
}
__device__ inline bool passes(float sum, float tau) { return !(fabsf(sum) < tau); }

// Where segment `index` begins, within the tensor whatever the offset is.
__device__ inline int64_t segment_begin(const MaskPackArgs& args, int index) {
  return min(max(args.segments[index], int64_t{0}), args.numel);
}

__device__ inline Segments all_segments(const MaskPackArgs& args) {
  const auto count = static_cast<int>(args.num_segments);
  return {0, count, count > 0 ? effective(args.threshold[0]) : -1.0f};
}

// Those of [begin, end), within the part that has `in`. By one warp.
__device__ inline Segments find_segments(const MaskPackArgs& args, const Segments& in,
                                         int64_t begin, int64_t end) {
  if (in.one()) return in;
  const int64_t* ends = args.segments + 1 + in.first;
  const int highest = in.count - 1, first = warp_upper_bound(ends, highest, begin);
  int more = 0;
  if (first < highest && ends[first] < end) {
    more = warp_upper_bound(ends + first, highest - first, end - 1);
  }
  return {in.first + first, more + 1, effective(args.threshold[in.first + first])};
}

// The segment of an element, of those of its tile, and its threshold.
__device__ inline int segment_of(const MaskPackArgs& args, const Segments& in, int64_t index) {
  return in.first + upper_bound(args.segments + 1 + in.first, in.count - 1, index);
}
__device__ inline float threshold_of(const MaskPackArgs& args, const Segments& in, int64_t index) {
  return in.one() ? in.tau : effective(args.threshold[segment_of(args, in, index)]);
}

// What the residual keeps of a sum that is not finite: what it had.
__device__ inline float finite_or_zero(float old) { return is_finite(old) ? old : 0.0f; }

// By one warp, slowly: function(element, sum, owned, passes) for elements [first, end) from `begin`
// on, one a lane, whatever their alignment and segments are. Lanes past the end, and those of
// skipped segments, own nothing. Both kernels call it, and find the same.
template <typename Grad, typename Function>
__device__ void for_each_element(const MaskPackArgs& args, const Segments& in, int64_t begin,
                                 int first, int end, Function function) {
  if (first >= end) return;
  const Segments segments = find_segments(args, in, begin + first, begin + end);
  const auto* grad = static_cast<const Grad*>(args.grad);
  const float scale = args.inv_scale != nullptr ? *args.inv_scale : 1.0f;
  constexpr int kAhead = 8;
  for (; first < end; first += kAhead * kWarpSize) {
    const int own = first + lane_index();
    float history[kAhead] = {};
    Grad gradient[kAhead] = {};
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (own + a * kWarpSize >= end) continue;
      history[a] = args.residual[begin + own + a * kWarpSize];
      if constexpr (kHasGrad<Grad>) gradient[a] = grad[begin + own + a * kWarpSize];
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const bool inside = own + a * kWarpSize < end;
      const int64_t element = begin + own + a * kWarpSize;
      const float sum = accumulate(history[a], gradient[a], scale);
      const float tau = inside ? threshold_of(args, segments, element) : -1.0f;
      function(element, sum, tau >= 0.0f, tau >= 0.0f && passes(sum, tau));
    }
  }
}

// Counts entries that pass and blocks' tiles of a segment in its word: passed << 26 | tiles. Who
// reaches its number of tiles knows all that pass, and writes `seen`. One does, whatever the
// offsets are.
__device__ inline void add_to_segment(const MaskPackArgs& args, const Staging& staging, int segment,
                                      Word passed, Word tiles) {
  constexpr int kTileBits = 26;
  const Word added = passed << kTileBits | tiles;
  const Word now = atomicAdd(&staging.segments[segment], added) + added;
  if (tiles == 0) return;
  const int64_t begin = segment_begin(args, segment), end = segment_begin(args, segment + 1);
  const int64_t tile = int64_t{kWarps} << staging.warp_tile_bits;
  const Word total = (end - 1) / tile - begin / tile + 1;
  const Word counted = now & ((Word{1} << kTileBits) - 1), seen = now >> kTileBits;
  if (counted < total || counted - tiles >= total) return;
  args.seen[segment] = static_cast<int32_t>(seen < 0x7fffffff ? seen : 0x7fffffff);
}

}  // namespace dct::cuda
