#pragma once

// Shared by the two kernels of mask_pack: the scratch memory between them, lookup of a tile's
// segments, and the slow path for elements that are not staged.

#include <limits>

#include "../../common/ops.h"
#include "elements.cuh"
#include "range_tiles.cuh"
#include "warp.cuh"

namespace dct::cuda {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kVectorElements = 4;
constexpr int kWarpVector = kWarpSize * kVectorElements;  // elements of one vector load by a warp
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kMostSeen = std::numeric_limits<int32_t>::max();
template <typename Grad>
constexpr bool kHasGrad = !std::is_same_v<Grad, NoGrad>;

// Tile state of one warp. Elements after the staged vectors are unchanged.
struct WarpCount {
  uint32_t kept : 12;    // entries that pass
  uint32_t staged : 12;  // of these, the first, in the warp's slot
  uint32_t vectors : 8;  // warp-wide vectors that are staged
};

// Output of compaction: a warp's slot, or a range of the payload.
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

// Scratch memory. The first kernel writes all that the second reads, so it need not be cleared.
struct Staging {
  int warp_tile;      // elements per warp; kWarps of them are a block's tile, which divides kBlock
  uint32_t room;      // entries per slot, a multiple of 8
  uint32_t* totals;   // [tiles]: entries kept | any non-finite << 31
  WarpCount* counts;  // [tiles, kWarps]
  uint8_t* slots;     // [tiles, kWarps]: u16 positions[room], value[room]

  __device__ Entries slot(int64_t index, DType value_dtype) const {
    uint8_t* const entries = slots + index * room * (2 + itemsize(value_dtype));
    return {reinterpret_cast<uint16_t*>(entries), entries + 2 * room, room, value_dtype};
  }
};

// Segments [first, first + count) of args.segments: those that overlap some elements.
struct Segments {
  int first, count;
  float tau;  // threshold of the first; negative if there is none
  __device__ bool one() const { return count <= 1; }
};

// A segment with a negative threshold is skipped. Zeros never pass, because the threshold is at
// least the smallest subnormal. A NaN passes any threshold, and any non-zero passes a NaN
// threshold.
__device__ inline float effective(float tau) {
  return tau < 0.0f ? tau : fmaxf(tau, bits_to_float(1));
}
__device__ inline bool passes(float sum, float tau) { return !(fabsf(sum) < tau); }

__device__ inline Segments all_segments(const MaskPackArgs& args) {
  const auto count = static_cast<int>(args.num_segments);
  return {0, count, count > 0 ? effective(args.threshold[0]) : -1.0f};
}

// The segments that overlap elements [begin, end), by a search within `in`. By one warp.
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

// The segment of an element, by a search within `in`, and its threshold.
__device__ inline int segment_of(const MaskPackArgs& args, const Segments& in, int64_t index) {
  return in.first + upper_bound(args.segments + 1 + in.first, in.count - 1, index);
}
__device__ inline float threshold_of(const MaskPackArgs& args, const Segments& in, int64_t index) {
  return in.one() ? in.tau : effective(args.threshold[segment_of(args, in, index)]);
}

// Saturating count of a segment's entries. An addition that overflows is followed by an exchange
// with the maximum, so the result does not depend on the order of operations.
__device__ inline void add_to_seen(const MaskPackArgs& args, int segment, uint32_t kept) {
  if (kept == 0) return;
  const auto added = static_cast<int32_t>(kept);
  const int32_t before = atomicAdd(&args.seen[segment], added);
  if (before < 0 || before > kMostSeen - added) atomicExch(&args.seen[segment], kMostSeen);
}

// The slow path, by one warp: calls function(element, sum, owned, kept) for elements [first, end)
// relative to `begin`, one per lane, of any alignment and any segments. `owned` is false past the
// end and in skipped segments. Both kernels call it and get the same `kept`.
template <typename Grad, typename Function>
__device__ void for_each_element(const MaskPackArgs& args, const Segments& in, int64_t begin,
                                 int first, int end, Function function) {
  if (first >= end) return;
  const Segments segments = find_segments(args, in, begin + first, begin + end);
  const auto* grad = static_cast<const Grad*>(args.grad);
  const float scale = args.inv_scale != nullptr ? *args.inv_scale : 1.0f;
  constexpr int kInFlight = 8;
  for (; first < end; first += kInFlight * kWarpSize) {
    const int offset = first + lane_index();
    float residual[kInFlight] = {};
    Grad gradient[kInFlight] = {};
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      if (offset + a * kWarpSize >= end) continue;
      residual[a] = args.residual[begin + offset + a * kWarpSize];
      if constexpr (kHasGrad<Grad>) gradient[a] = grad[begin + offset + a * kWarpSize];
    }
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      const bool inside = offset + a * kWarpSize < end;
      const int64_t element = begin + offset + a * kWarpSize;
      const float sum = accumulate(residual[a], gradient[a], scale);
      const float tau = inside ? threshold_of(args, segments, element) : -1.0f;
      function(element, sum, tau >= 0.0f, tau >= 0.0f && passes(sum, tau));
    }
  }
}

}  // namespace dct::cuda
