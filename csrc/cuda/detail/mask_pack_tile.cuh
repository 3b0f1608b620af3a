#pragma once

// What the two kernels of mask_pack share: the scratch between them, the segments of a tile, and
// the slow path, over elements that are not staged.

#include <limits>

#include "../../common/ops.h"
#include "elements.cuh"
#include "range_tiles.cuh"
#include "warp.cuh"

namespace dct::cuda {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kVectorElements = 4;
constexpr int kRow = kWarpSize * kVectorElements;  // elements that a warp reads at once
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kMostSeen = std::numeric_limits<int32_t>::max();
template <typename Grad>
constexpr bool kHasGrad = !std::is_same_v<Grad, NoGrad>;

// Of a warp's tile. Rows that are not done are as they were.
struct WarpCount {
  uint32_t kept : 12;    // entries to pack
  uint32_t staged : 12;  // the first of these, in the warp's slot
  uint32_t rows : 8;     // done
};

// Room for entries, in a slot or in the payload.
struct Entries {
  uint16_t* positions;
  uint8_t* values;
  uint32_t room;
  DType value_dtype;

  __device__ void put(uint32_t entry, int64_t element, uint32_t bits) const {
    positions[entry] = static_cast<uint16_t>(element & (kBlock - 1));
    store_value(values, entry, bits, value_dtype);
  }
};

// The scratch. The first kernel writes all that the second reads: it need not be cleared.
struct Staging {
  int warp_tile;      // elements; a block's tile is kWarps of them, and divides kBlock
  uint32_t room;      // entries of a slot, a multiple of 8
  uint32_t* totals;   // [tiles]: entries kept | whether one is not finite << 31
  WarpCount* counts;  // [tiles, kWarps]
  uint8_t* slots;     // [tiles, kWarps]: u16 positions[room], value[room]

  __device__ Entries slot(int64_t index, DType value_dtype) const {
    uint8_t* const entries = slots + index * room * (2 + itemsize(value_dtype));
    return {reinterpret_cast<uint16_t*>(entries), entries + 2 * room, room, value_dtype};
  }
};

// Segments [first, first + count) of args.segments, which share a part of the tensor.
struct Segments {
  int first, count;
  float tau;  // of the first; negative if there is none
  __device__ bool one() const { return count <= 1; }
};

// Negative thresholds skip. Zeros never pass: no float but zero is below the smallest subnormal. A
// NaN threshold passes all others, and a NaN passes any threshold.
__device__ inline float effective(float tau) {
  return tau < 0.0f ? tau : fmaxf(tau, bits_to_float(1));
}
__device__ inline bool passes(float sum, float tau) { return !(fabsf(sum) < tau); }

__device__ inline Segments all_segments(const MaskPackArgs& args) {
  const auto count = static_cast<int>(args.num_segments);
  return {0, count, count > 0 ? effective(args.threshold[0]) : -1.0f};
}

// The segments of [begin, end), which are among those `in`. By one warp.
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

// The segment of an element, among those `in`, and its threshold.
__device__ inline int segment_of(const MaskPackArgs& args, const Segments& in, int64_t index) {
  return in.first + upper_bound(args.segments + 1 + in.first, in.count - 1, index);
}
__device__ inline float threshold_of(const MaskPackArgs& args, const Segments& in, int64_t index) {
  return in.one() ? in.tau : effective(args.threshold[segment_of(args, in, index)]);
}

// Counts entries of a segment, up to the largest int32. An addition that overflows is followed by
// the maximum, so the last operation on the count leaves the same in any order.
__device__ inline void add_to_seen(const MaskPackArgs& args, int segment, uint32_t kept) {
  if (kept == 0) return;
  const auto added = static_cast<int32_t>(kept);
  const int32_t before = atomicAdd(&args.seen[segment], added);
  if (before < 0 || before > kMostSeen - added) atomicExch(&args.seen[segment], kMostSeen);
}

// What the residual keeps if a sum is not finite.
__device__ inline float finite_or_zero(float old) { return is_finite(old) ? old : 0.0f; }

// By one warp, slowly: function(element, sum, owned, kept) for elements [first, end) from `begin`
// on, one per lane, whatever their alignment and segments are. Lanes past the end, and those of
// skipped segments, own nothing. Both kernels call it, and find the same kept.
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
    float residual[kAhead] = {};
    Grad gradient[kAhead] = {};
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (own + a * kWarpSize >= end) continue;
      residual[a] = args.residual[begin + own + a * kWarpSize];
      if constexpr (kHasGrad<Grad>) gradient[a] = grad[begin + own + a * kWarpSize];
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const bool inside = own + a * kWarpSize < end;
      const int64_t element = begin + own + a * kWarpSize;
      const float sum = accumulate(residual[a], gradient[a], scale);
      const float tau = inside ? threshold_of(args, segments, element) : -1.0f;
      function(element, sum, tau >= 0.0f, tau >= 0.0f && passes(sum, tau));
    }
  }
}

}  // namespace dct::cuda
