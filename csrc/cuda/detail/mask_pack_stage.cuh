#pragma once

// The first kernel of mask_pack: reads every element once and compacts entries into a slot per
// warp. No block waits for another.

#include "mask_pack_tile.cuh"

namespace dct::cuda {

// Vectors of each tensor that a lane loads at once. Long runs of a tensor count for more than
// resident warps: on an H200, half as many vectors at twice the occupancy are a tenth slower.
constexpr int kVectors = 8;
template <typename Grad>
constexpr int kStageMinBlocks = kHasGrad<Grad> ? 2 : 3;  // 128 or 80 registers per thread

// Vectors that contain a kept entry, compacted in element order until full warps can process them.
// Flushed before the loads of a pass, when registers are free.
constexpr uint32_t kBufferVectors = 256, kFlushAt = 48;
struct CompactionBuffer {
  alignas(16) float sums[kBufferVectors][kVectorElements];
  uint32_t offset_and_mask[kBufferVectors];  // offset in the warp's tile << 2 | mask of kept sums
};

// Stages a tile, one pass at a time: load, accumulate, compare, compact the vectors with kept
// entries, store the others. A vector with a kept entry is stored when it is flushed: until then
// the residual holds its old value, which it keeps where the sum is not finite.
template <typename Grad>
struct WarpStager {
  static constexpr int kItemsPerThread = kVectors * kVectorElements;
  static constexpr int kPass = kWarpSize * kItemsPerThread;  // elements that a warp loads at once
  using Sums = float[kVectors][kVectorElements];             // of one lane

  const MaskPackArgs& args;
  const Staging& staging;
  CompactionBuffer& buffer;
  int64_t begin;
  unsigned slot;
  uint32_t kept = 0, staged = 0, buffered = 0;
  bool non_finite = false;

  // `length` is the tile's number of elements, `segments` those of the tile.
  __device__ WarpCount run(const Segments& segments, int length, bool aligned) {
    if (segments.one() && segments.tau < 0.0f) {
      return {0, 0, uint32_t(staging.warp_tile) / kWarpVector};
    }
    const int done = stage(segments, aligned ? length / kPass * kPass : 0);
    flush();
    // The second kernel packs the remaining elements; later entries and the header need their
    // count.
    const auto count = [&](int64_t, float sum, bool, bool keeps) {
      kept += __popc(__ballot_sync(kFullWarp, keeps));
      non_finite |= keeps && !is_finite(sum);
    };
    for_each_element<Grad>(args, segments, begin, done, length, count);
    return {kept, staged, uint32_t(done) / kWarpVector};
  }

  // Brings a pass to the L2 cache while there are no registers for it. A lane has a line or two.
  __device__ void prefetch(int pass) const {
    const int64_t first = begin + pass;
    const int at = lane_index() * kCacheLine;
    if (at < kPass * int{sizeof(float)}) {
      prefetch_line(reinterpret_cast<const char*>(args.residual + first) + at);
    }
    if constexpr (kHasGrad<Grad>) {
      const auto* grad = reinterpret_cast<const char*>(static_cast<const Grad*>(args.grad) + first);
      if (at < kPass * int{sizeof(Grad)}) prefetch_line(grad + at);
    }
  }

  // Stages whole passes up to `end`, until a pass does not fit. Nothing of a pass is stored before
  // its count is known, because the second kernel must find a pass that does not fit unchanged.
  __device__ int stage(const Segments& segments, int end) {
    const float scale = args.inv_scale != nullptr ? *args.inv_scale : 1.0f;
    const bool plain = segments.one() && segments.tau < kInfinity;
    const int lane = lane_index() * kVectorElements;
    float* residual = args.residual + begin + lane;
    const Grad* grad = static_cast<const Grad*>(args.grad) + (kHasGrad<Grad> ? begin + lane : 0);
    int pass = 0;
    for (; pass < end; pass += kPass, residual += kPass, grad += kPass) {
      if (buffered >= kFlushAt) flush();
      if (pass + kPass < end) prefetch(pass + kPass);
      Sums sums;
      Grad gradient[kVectors][kVectorElements];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        stream_in(residual + v * kWarpVector, sums[v]);
        stream_in(grad + v * kWarpVector, gradient[v]);
      }
#pragma unroll
      for (int i = 0; i < kItemsPerThread; ++i) {
        float& sum = sums[i / kVectorElements][i % kVectorElements];
        sum = accumulate(sum, gradient[i / kVectorElements][i % kVectorElements], scale);
      }
      const uint32_t keeps = plain ? mark(sums, segments.tau) : mark(sums, segments, begin + pass);
      const uint32_t kept_in_pass = __reduce_add_sync(kFullWarp, __popc(keeps));
      if (buffered + kept_in_pass > kBufferVectors || kept + kept_in_pass > staging.room) break;
      kept += kept_in_pass;
      if (kept_in_pass != 0) compact(sums, keeps, pass + lane);
      if constexpr (kHasGrad<Grad>) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if ((keeps >> (4 * v) & 15) == 0) stream_out(residual + v * kWarpVector, sums[v]);
        }
      }
    }
    return pass;
  }

  // Bit 4 * v + e is set where sums[v][e] passes. With a finite threshold, |sum| - tau is negative
  // only if the sum does not pass; the difference of a NaN is a positive NaN. Costs one addition
  // and one shift each. Needs gradual underflow.
  static __device__ uint32_t mark(const Sums& sums, float tau) {
    uint32_t below = 0;
#pragma unroll
    for (int i = kItemsPerThread - 1; i >= 0; --i) {
      const float sum = sums[i / kVectorElements][i % kVectorElements];
      below = __funnelshift_l(float_to_bits(__fsub_rn(fabsf(sum), tau)), below, 1);
    }
    return ~below & 0xffffffff >> (32 - kItemsPerThread);
  }

  // For several segments or an infinite threshold, where inf - inf is a NaN of either sign. All
  // bits are set for a pass with a skipped segment: such a pass never fits.
  __device__ uint32_t mark(const Sums& sums, const Segments& segments, int64_t pass) const {
    uint32_t keeps = 0;
    const Segments pass_segments = find_segments(args, segments, pass, pass + kPass);
    const int64_t first = pass + lane_index() * kVectorElements;
    const auto in_pass = [&](int64_t x) { return int(min(max(x, first), first + kPass) - first); };
    for (int s = pass_segments.first; s < pass_segments.first + pass_segments.count; ++s) {
      const float tau = effective(args.threshold[s]);
      if (tau < 0.0f) return ~0u;
      const int from = in_pass(args.segments[s]), to = in_pass(args.segments[s + 1]);
#pragma unroll
      for (int i = 0; i < kItemsPerThread; ++i) {
        const int v = i / kVectorElements, e = i % kVectorElements, at = v * kWarpVector + e;
        if (from <= at && at < to && passes(sums[v][e], tau)) keeps |= 1u << i;
      }
    }
    return keeps;
  }

  __device__ void compact(const Sums& sums, uint32_t keeps, int offset) {
    const uint32_t below = (1u << lane_index()) - 1;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector_mask = keeps >> (4 * v) & 15;
      const uint32_t lanes = __ballot_sync(kFullWarp, vector_mask != 0);
      if (vector_mask != 0) {
        const uint32_t at = buffered + __popc(lanes & below);
        memcpy(buffer.sums[at], sums[v], sizeof(sums[v]));
        buffer.offset_and_mask[at] = (offset + v * kWarpVector) << 2 | vector_mask;
      }
      buffered += __popc(lanes);
    }
  }

  // Moves the buffered entries to the warp's slot and their remainders to the residual.
  __device__ void flush() {
    const Entries entries = staging.slot(slot, args.value_dtype);
    __syncwarp();
    for (uint32_t first = 0; first < buffered; first += kWarpSize) {
      const uint32_t at = first + lane_index();
      const uint32_t offset_and_mask = at < buffered ? buffer.offset_and_mask[at] : 0;
      const uint32_t offset = offset_and_mask >> 4 << 2;
      const uint32_t count = __popc(offset_and_mask & 15), inclusive = warp_inclusive_sum(count);
      uint32_t entry = staged + inclusive - count;
      staged += __shfl_sync(kFullWarp, inclusive, kWarpSize - 1);
      if (offset_and_mask == 0) continue;
      float* residual = args.residual + begin + offset;
      float (&sums)[kVectorElements] = buffer.sums[at];
      for (uint32_t mask = offset_and_mask & 15; mask != 0; mask &= mask - 1) {
        const int e = __ffs(static_cast<int>(mask)) - 1;
        const bool finite = is_finite(sums[e]);
        const Split split_sum = split(sums[e], args.value_dtype);
        entries.put(entry++, begin + offset + e, split_sum.bits);
        sums[e] = finite ? split_sum.remainder : finite_or_zero(residual[e]);
        non_finite |= !finite;
      }
      stream_out(residual, sums);
    }
    __syncwarp();
    buffered = 0;
  }
};

template <typename Grad>
__global__ void __launch_bounds__(kThreads, kStageMinBlocks<Grad>)
    mask_pack_stage_kernel(MaskPackArgs args, RangeTiles tiles, Staging staging, bool aligned) {
  struct Shared {
    CompactionBuffer buffer[kWarps];
    Segments segments;  // of the tile
    uint32_t sum;       // kept | warps << 16 | warps with a non-finite entry << 24
  };
  __shared__ Shared shared;
  const int lane = lane_index(), warp = warp_index();
  const Range tile = tiles.locate(blockIdx.x).bounds;
  const int64_t begin = tile.begin + warp * staging.warp_tile;
  const int length = min(static_cast<int>(tile.end - begin), staging.warp_tile);
  const unsigned slot = blockIdx.x * kWarps + warp;
  WarpStager<Grad> stager = {args, staging, shared.buffer[warp], begin, slot};
  if (aligned && length >= stager.kPass) stager.prefetch(0);  // while segments are looked up
  if (warp == 0) {
    const Segments found = find_segments(args, all_segments(args), tile.begin, tile.end);
    if (lane == 0) {
      shared.segments = found;
      shared.sum = 0;
    }
  }
#pragma unroll 1
  for (int64_t s = int64_t{blockIdx.x} * kThreads + thread_index(); s < args.num_segments;
       s += int64_t{gridDim.x} * kThreads) {
    args.seen[s] = 0;  // the second kernel adds to it
  }
  __syncthreads();

  const WarpCount counted =
      stager.run(find_segments(args, shared.segments, begin, begin + length), length, aligned);
  const bool non_finite = __any_sync(kFullWarp, stager.non_finite) != 0;
  if (lane != 0) return;
  staging.counts[slot] = counted;
  // The last warp to arrive has the block's aggregate, so no warp waits for the slowest.
  const uint32_t aggregate = counted.kept | 1u << 16 | uint32_t{non_finite} << 24;
  const uint32_t sum = atomicAdd(&shared.sum, aggregate) + aggregate;
  if ((sum >> 16 & 255) == kWarps) {
    staging.totals[blockIdx.x] = (sum & 0xffff) | uint32_t{sum >> 24 != 0} << 31;
  }
}

}  // namespace dct::cuda
