#pragma once

// The first kernel of mask_pack: it reads every element once, and no warp waits for another block.

#include "mask_pack_tile.cuh"

namespace dct::cuda {

// Vectors that a lane reads at once: 16 KB per warp in flight, of float32. More would spill, and so
// would a search for segments while these are in flight.
template <typename Grad>
constexpr int kVectors = kHasGrad<Grad> ? 4 : 8;
template <typename Grad>
constexpr int kStageMinBlocks = kHasGrad<Grad> ? 4 : 3;  // a multiprocessor: 64 or 80 registers

// Vectors with a kept entry, in the order of their elements, until full warps can take them. They
// are flushed before a pass is read, when its registers are free.
constexpr uint32_t kRecords = 128, kFlushFrom = 48;
struct Records {
  alignas(16) float sums[kRecords][kVectorElements];
  uint32_t which[kRecords];  // offset in the warp's tile << 2 | which of the four are kept
};

// A warp stages its tile pass by pass: it reads, adds, marks what passes, collects that, and writes
// the rest. A vector with an entry is written when it is flushed: until then the residual has its
// old value, which it keeps if the sum is not finite.
template <typename Grad>
struct WarpStager {
  static constexpr int kOwn = kVectors<Grad> * kVectorElements;  // elements of a lane in a pass
  static constexpr int kPass = kWarpSize * kOwn;
  using Sums = float[kVectors<Grad>][kVectorElements];  // of a lane in a pass

  const MaskPackArgs& args;
  const Staging& staging;
  Records& records;
  int64_t begin;
  unsigned slot;
  uint32_t kept = 0, staged = 0, collected = 0;
  bool non_finite = false;

  // `length`: elements of the tile, in `segments`.
  __device__ WarpCount run(const Segments& segments, int length, bool aligned) {
    if (segments.one() && segments.tau < 0.0f) return {0, 0, uint32_t(staging.warp_tile) / kRow};
    const int done = stage(segments, aligned ? length / kPass * kPass : 0);
    flush();
    // The second kernel places the rest; entries behind it, and the header, need its count.
    const auto count = [&](int64_t, float sum, bool, bool keeps) {
      kept += __popc(__ballot_sync(kFullWarp, keeps));
      non_finite |= keeps && !is_finite(sum);
    };
    for_each_element<Grad>(args, segments, begin, done, length, count);
    return {kept, staged, uint32_t(done) / kRow};
  }

  // Stages whole passes up to `end`, as long as there is room. How much a pass keeps is known
  // before any of it is written: the second kernel must find what is left out as it was.
  __device__ int stage(const Segments& segments, int end) {
    const float scale = args.inv_scale != nullptr ? *args.inv_scale : 1.0f;
    const bool plain = segments.one() && segments.tau < kInfinity;
    const int lane = lane_index() * kVectorElements;
    float* residual = args.residual + begin + lane;
    const Grad* grad = static_cast<const Grad*>(args.grad) + (kHasGrad<Grad> ? begin + lane : 0);
    int pass = 0;
    for (; pass < end; pass += kPass, residual += kPass, grad += kPass) {
      if (collected >= kFlushFrom) flush();
      Sums sums;
      Grad gradient[kVectors<Grad>][kVectorElements];
#pragma unroll
      for (int v = 0; v < kVectors<Grad>; ++v) {
        stream_in(residual + v * kRow, sums[v]);
        stream_in(grad + v * kRow, gradient[v]);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        float& sum = sums[i / kVectorElements][i % kVectorElements];
        sum = accumulate(sum, gradient[i / kVectorElements][i % kVectorElements], scale);
      }
      const uint32_t keeps = plain ? mark(sums, segments.tau) : mark(sums, segments, begin + pass);
      const uint32_t of_pass = __reduce_add_sync(kFullWarp, __popc(keeps));
      if (collected + of_pass > kRecords || kept + of_pass > staging.room) break;
      kept += of_pass;
      if (of_pass != 0) collect(sums, keeps, pass + lane);
      if constexpr (kHasGrad<Grad>) {
#pragma unroll
        for (int v = 0; v < kVectors<Grad>; ++v) {
          if ((keeps >> (4 * v) & 15) == 0) stream_out(residual + v * kRow, sums[v]);
        }
      }
    }
    return pass;
  }

  // Which of a lane's sums pass: bit 4 * v + e. With a finite threshold |sum| - tau has no sign if
  // the sum passes, and a NaN has none: one addition and one shift each. Needs gradual underflow.
  static __device__ uint32_t mark(const Sums& sums, float tau) {
    uint32_t below = 0;
#pragma unroll
    for (int i = kOwn - 1; i >= 0; --i) {
      const float sum = sums[i / kVectorElements][i % kVectorElements];
      below = __funnelshift_l(float_to_bits(__fsub_rn(fabsf(sum), tau)), below, 1);
    }
    return ~below & 0xffffffff >> (32 - kOwn);
  }

  // The same with several segments or an infinite threshold, because inf - inf is a NaN of either
  // sign. A pass that is skipped in part is left out: it keeps more than there is room for.
  __device__ uint32_t mark(const Sums& sums, const Segments& segments, int64_t pass) const {
    uint32_t keeps = 0;
    const Segments of_pass = find_segments(args, segments, pass, pass + kPass);
    const int64_t own = pass + lane_index() * kVectorElements;
    const auto in_pass = [&](int64_t x) { return int(min(max(x, own), own + kPass) - own); };
    for (int s = of_pass.first; s < of_pass.first + of_pass.count; ++s) {
      const float tau = effective(args.threshold[s]);
      if (tau < 0.0f) return ~0u;
      const int from = in_pass(args.segments[s]), to = in_pass(args.segments[s + 1]);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int v = i / kVectorElements, e = i % kVectorElements, at = v * kRow + e;
        if (from <= at && at < to && passes(sums[v][e], tau)) keeps |= 1u << i;
      }
    }
    return keeps;
  }

  __device__ void collect(const Sums& sums, uint32_t keeps, int offset) {
    const uint32_t below = (1u << lane_index()) - 1;
#pragma unroll
    for (int v = 0; v < kVectors<Grad>; ++v) {
      const uint32_t of_vector = keeps >> (4 * v) & 15;
      const uint32_t lanes = __ballot_sync(kFullWarp, of_vector != 0);
      if (of_vector != 0) {
        const uint32_t at = collected + __popc(lanes & below);
        memcpy(records.sums[at], sums[v], sizeof(sums[v]));
        records.which[at] = (offset + v * kRow) << 2 | of_vector;
      }
      collected += __popc(lanes);
    }
  }

  // Moves what has been collected to the slot, and the remainders to the residual.
  __device__ void flush() {
    const Entries entries = staging.slot(slot, args.value_dtype);
    __syncwarp();
    for (uint32_t first = 0; first < collected; first += kWarpSize) {
      const uint32_t at = first + lane_index();
      const uint32_t which = at < collected ? records.which[at] : 0, offset = which >> 4 << 2;
      const uint32_t own = __popc(which & 15), up_to = warp_inclusive_sum(own);
      uint32_t entry = staged + up_to - own;
      staged += __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
      if (which == 0) continue;
      float* residual = args.residual + begin + offset;
      float (&sums)[kVectorElements] = records.sums[at];
      for (uint32_t left = which & 15; left != 0; left &= left - 1) {
        const int e = __ffs(static_cast<int>(left)) - 1;
        const bool finite = is_finite(sums[e]);
        const Taken taken = take(sums[e], args.value_dtype);
        entries.put(entry++, begin + offset + e, taken.bits);
        sums[e] = finite ? taken.left : finite_or_zero(residual[e]);
        non_finite |= !finite;
      }
      stream_out(residual, sums);
    }
    __syncwarp();
    collected = 0;
  }
};

template <typename Grad>
__global__ void __launch_bounds__(kThreads, kStageMinBlocks<Grad>)
    mask_pack_stage_kernel(MaskPackArgs args, RangeTiles tiles, Staging staging, bool aligned) {
  struct Shared {
    Records records[kWarps];
    Range tile;
    Segments segments;  // of the tile
    uint32_t sum;       // kept | warps << 16 | those with an entry that is not finite << 24
  };
  __shared__ Shared shared;
  const int lane = lane_index(), warp = warp_index();
  if (warp == 0) {
    const Range tile = tiles.locate(blockIdx.x).bounds;
    const Segments found = find_segments(args, all_segments(args), tile.begin, tile.end);
    if (lane == 0) {
      shared.tile = tile;
      shared.segments = found;
      shared.sum = 0;
    }
  }
#pragma unroll 1
  for (int64_t s = int64_t{blockIdx.x} * kThreads + thread_index(); s < args.num_segments;
       s += int64_t{gridDim.x} * kThreads) {
    args.seen[s] = 0;  // the second kernel adds
  }
  __syncthreads();

  const unsigned slot = blockIdx.x * kWarps + warp;
  const int64_t begin = shared.tile.begin + warp * staging.warp_tile;
  const int length = min(static_cast<int>(shared.tile.end - begin), staging.warp_tile);
  WarpStager<Grad> stager = {args, staging, shared.records[warp], begin, slot};
  const WarpCount counted =
      stager.run(find_segments(args, shared.segments, begin, begin + length), length, aligned);
  const bool non_finite = __any_sync(kFullWarp, stager.non_finite) != 0;
  if (lane != 0) return;
  staging.counts[slot] = counted;
  // The last warp to arrive has the sum, so no warp waits for the slowest.
  const uint32_t own = counted.kept | 1u << 16 | uint32_t{non_finite} << 24;
  const uint32_t sum = atomicAdd(&shared.sum, own) + own;
  if ((sum >> 16 & 255) == kWarps) {
    staging.totals[blockIdx.x] = (sum & 0xffff) | uint32_t{sum >> 24 != 0} << 31;
  }
}

}  // namespace dct::cuda
