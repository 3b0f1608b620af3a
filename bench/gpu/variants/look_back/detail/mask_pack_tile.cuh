#pragma once

// The part of mask_pack that knows elements: a thread's 16 of them, the segments they lie in, the
// thresholds, and the sums' way back into the residual.

#include <limits>

#include "../../common/ops.h"
#include "../../common/payload.h"
#include "elements.cuh"
#include "range_tiles.cuh"
#include "warp.cuh"

namespace dct::cuda {

// What a payload of this dtype makes of x.
__device__ inline float through_payload(float x, DType value_dtype) {
  return value_dtype == DType::kBFloat16 ? to_float(round_saturating<BFloat16>(x)) : x;
}

__device__ inline void store_payload_value(uint8_t* values, int index, float x, DType value_dtype) {
  if (value_dtype == DType::kBFloat16) {
    reinterpret_cast<BFloat16*>(values)[index] = round_saturating<BFloat16>(x);
  } else {
    reinterpret_cast<float*>(values)[index] = round_saturating<float>(x);
  }
}

struct MaskPackPolicy {
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 4;  // a multiprocessor: at most 64 registers a thread
  static constexpr int kMinBlocksWithoutGrad = 6;  // at most 40
  static constexpr int kVectors = 4;  // of four elements: 32 KB in flight a block, with a gradient
};
constexpr int kWarps = MaskPackPolicy::kThreads / kWarpSize;
constexpr int kVectorElements = 4;
constexpr int kRow = kWarpSize * kVectorElements;  // what a warp reads at once
constexpr int kWarpTile = kRow * MaskPackPolicy::kVectors;
constexpr int kTile = kWarps * kWarpTile;
static_assert(kBlock % kTile == 0, "a payload block begins with a tile");
static_assert(MaskPackPolicy::kVectors <= 4, "the counts of a thread's rows share a 32-bit word");

// A segment's progress: kept entries << 26 | tiles counted. One atomic tells the last tile both.
constexpr int kSegmentTileBits = 26;

struct MaskPackTile {
  RangeTiles::Tile at;
  int64_t first_segment, last_segment;  // that have elements in it, or in between
  float tau;                            // of the first segment
  bool one_segment;
};

// The 16 elements of a thread; element (j, e) is bit 4 * j + e of the masks.
struct Elements {
  float acc[MaskPackPolicy::kVectors][kVectorElements];
  uint32_t owned;  // in the tensor, and in a segment that is not skipped
  uint32_t kept;
};

// Of the first of its elements in the tile.
__device__ inline int thread_offset() {
  const int warp = warp_index(), lane = lane_index();
  return warp * kWarpTile + lane * kVectorElements;
}

// Zeros never pass: no float but zero is below the smallest subnormal. A NaN threshold passes all
// others, and a NaN passes any threshold.
__device__ inline float effective(float tau) { return fmaxf(tau, bits_to_float(1)); }
__device__ inline bool passes(float acc, float tau) { return !(fabsf(acc) < tau); }
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Where segment `index` begins, within the tensor whatever the offset is.
__device__ inline int64_t segment_begin(const MaskPackArgs& args, int64_t index) {
  return min(max(args.segments[index], int64_t{0}), args.numel);
}

// Counts kept entries and whole tiles of a segment; the last tile to be counted writes `seen`.
__device__ inline void add_to_segment(const MaskPackArgs& args, Word* segment_words,
                                      int64_t segment, Word kept, Word tiles) {
  const Word added = kept << kSegmentTileBits | tiles;
  const Word now = atomicAdd(&segment_words[segment], added) + added;
  if (tiles == 0) return;
  const int64_t begin = segment_begin(args, segment), end = segment_begin(args, segment + 1);
  const Word total_tiles = (end - 1) / kTile - begin / kTile + 1;
  if ((now & ((Word{1} << kSegmentTileBits) - 1)) < total_tiles) return;
  const Word seen = now >> kSegmentTileBits;
  args.seen[segment] = static_cast<int32_t>(seen < 0x7fffffff ? seen : 0x7fffffff);
}

// By one warp: the segments that lie in a tile.
__device__ inline void find_segments(const MaskPackArgs& args, MaskPackTile& tile) {
  const int64_t begin = tile.at.bounds.begin, end = tile.at.bounds.end;
  const int64_t highest = args.num_segments - 1;
  tile.first_segment = tile.last_segment = -1;
  tile.one_segment = true;
  tile.tau = -1.0f;
  if (begin == end || highest < 0) return;  // nothing to read: as if skipped

  const int64_t* ends = args.segments + 1;
  const int64_t first = warp_upper_bound(ends, args.num_segments, begin);
  tile.first_segment = tile.last_segment = first < highest ? first : highest;
  tile.tau = args.threshold[tile.first_segment];
  tile.one_segment = ends[tile.first_segment] >= end;
  if (!tile.one_segment) {
    const int64_t last = warp_upper_bound(ends, args.num_segments, end - 1);
    tile.last_segment = last < highest ? last : highest;
  }
}

// By one warp: takes a ticket, so that tiles are numbered in the order in which blocks start, and
// finds the tile's segments. Blocks start nearly in the order of their index: while the ticket is
// on its way, the segments are found for the tile of that index, and they are mostly the same.
__device__ inline MaskPackTile begin_tile(const MaskPackArgs& args, const RangeTiles& tiles,
                                          unsigned* ticket) {
  unsigned work = lane_index() == 0 ? atomicAdd(ticket, 1u) : 0;
  MaskPackTile tile;
  tile.at = tiles.locate(blockIdx.x);
  find_segments(args, tile);
  work = __shfl_sync(kFullWarp, work, 0);
  if (work == blockIdx.x) return tile;
  tile.at = tiles.locate(work);
  const auto& bounds = tile.at.bounds;
  const int64_t* segment = args.segments + tile.first_segment;
  if (tile.first_segment >= 0 && bounds.begin < bounds.end && segment[0] <= bounds.begin &&
      bounds.end <= segment[1]) {
    tile.last_segment = tile.first_segment;
    tile.one_segment = true;
  } else {
    find_segments(args, tile);
  }
  return tile;
}

// Reads the elements of a tile, by vectors if it is `whole`; all loads are issued before the first
// is used.
template <typename Grad>
__device__ void load(const MaskPackArgs& args, const MaskPackTile& tile, bool whole, float scale,
                     Elements& own) {
  const int length = static_cast<int>(tile.at.bounds.end - tile.at.bounds.begin);
  const int64_t base = tile.at.bounds.begin + thread_offset();
  const auto* grad = static_cast<const Grad*>(args.grad);
  float history[MaskPackPolicy::kVectors][kVectorElements] = {};
  Grad gradient[MaskPackPolicy::kVectors][kVectorElements] = {};
  if (whole) {
#pragma unroll
    for (int j = 0; j < MaskPackPolicy::kVectors; ++j) {
      stream_in(args.residual + base + j * kRow, history[j]);
      stream_in(grad + base + j * kRow, gradient[j]);
    }
    own.owned = 0xffff;
  } else {
#pragma unroll
    for (int i = 0; i < MaskPackPolicy::kVectors * kVectorElements; ++i) {
      const int j = i / kVectorElements, e = i % kVectorElements;
      if (thread_offset() + j * kRow + e >= length) continue;
      history[j][e] = args.residual[base + j * kRow + e];
      if constexpr (!std::is_same_v<Grad, NoGrad>) gradient[j][e] = grad[base + j * kRow + e];
      own.owned |= 1u << i;
    }
  }
#pragma unroll
  for (int i = 0; i < MaskPackPolicy::kVectors * kVectorElements; ++i) {
    const int j = i / kVectorElements, e = i % kVectorElements;
    own.acc[j][e] = accumulate(history[j][e], gradient[j][e], scale);
  }
}

// The segment that a thread is in, as it walks along its elements.
struct SegmentCursor {
  int64_t segment;
  int end;  // in the tile
  float tau;

  __device__ void enter(const MaskPackArgs& args, const MaskPackTile& tile, int64_t which) {
    segment = which;
    tau = args.threshold[which];
    const int64_t left = segment_begin(args, which + 1) - tile.at.bounds.begin;
    end = which == tile.last_segment || left > kTile ? kTile
                                                     : static_cast<int>(max(left, int64_t{0}));
  }
  // Enters the segment of an element that lies behind this one.
  __device__ void seek(const MaskPackArgs& args, const MaskPackTile& tile, int offset) {
    const int64_t* ends = args.segments + 1 + segment + 1;
    const int64_t passed =
        upper_bound(ends, tile.last_segment - segment - 1, tile.at.bounds.begin + offset);
    enter(args, tile, segment + 1 + passed);
  }
};

// Marks what is kept in a tile of one segment.
__device__ inline void mark(float tau, Elements& own) {
#pragma unroll
  for (int i = 0; i < MaskPackPolicy::kVectors * kVectorElements; ++i) {
    if (passes(own.acc[i / kVectorElements][i % kVectorElements], tau)) own.kept |= 1u << i;
  }
  own.kept &= own.owned;
}

// Marks what is kept in a tile that segments share, and counts it for each of them. What belongs to
// a skipped segment is not owned.
__device__ inline void mark_across(const MaskPackArgs& args, Word* segment_words,
                                   const MaskPackTile& tile, Elements& own) {
  SegmentCursor cursor;
  cursor.enter(args, tile, tile.first_segment);
#pragma unroll
  for (int j = 0; j < MaskPackPolicy::kVectors; ++j) {
    int kept = 0;
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      const int offset = thread_offset() + j * kRow + e;
      const uint32_t bit = 1u << (4 * j + e);
      if (!(own.owned & bit)) continue;
      if (offset >= cursor.end) {
        if (kept > 0) add_to_segment(args, segment_words, cursor.segment, kept, 0);
        kept = 0;
        cursor.seek(args, tile, offset);
      }
      if (cursor.tau < 0.0f) own.owned &= ~bit;
      if (cursor.tau < 0.0f || !passes(own.acc[j][e], effective(cursor.tau))) continue;
      own.kept |= bit;
      ++kept;
    }
    if (kept > 0) add_to_segment(args, segment_words, cursor.segment, kept, 0);
  }
}

// Writes the sums to the residual. One that is not finite is kept, and the residual keeps what it
// had.
__device__ inline void store_sums(const MaskPackArgs& args, const MaskPackTile& tile, bool whole,
                                  Elements& own) {
  const int64_t base = tile.at.bounds.begin + thread_offset();
  bool finite = true;
#pragma unroll
  for (int i = 0; i < MaskPackPolicy::kVectors * kVectorElements; ++i) {
    finite &= fabsf(own.acc[i / kVectorElements][i % kVectorElements]) < kInfinity;
  }
  if (!finite) {
#pragma unroll
    for (int i = 0; i < MaskPackPolicy::kVectors * kVectorElements; ++i) {
      const int j = i / kVectorElements, e = i % kVectorElements;
      if (!(own.owned >> i & 1) || is_finite(own.acc[j][e])) continue;
      const float old = args.residual[base + j * kRow + e];
      own.acc[j][e] = is_finite(old) ? old : 0.0f;
    }
  }
#pragma unroll
  for (int j = 0; j < MaskPackPolicy::kVectors; ++j) {
    const uint32_t owned = own.owned >> (4 * j) & 15;
    if (whole && owned == 15) {
      stream_out(args.residual + base + j * kRow, own.acc[j]);
      continue;
    }
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      if (owned >> e & 1) args.residual[base + j * kRow + e] = own.acc[j][e];
    }
  }
}

}  // namespace dct::cuda
