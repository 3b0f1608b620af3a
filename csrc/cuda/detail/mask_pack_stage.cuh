#pragma once

// The first kernel of mask_pack: every element once, and nobody waits for anybody.

#include "mask_pack_tile.cuh"

namespace dct::cuda {

// Of four elements, that a lane reads at once: 16 KB a warp in flight, of float32. More spills, and
// so do segments that are looked for while these are on their way.
template <typename Grad>
constexpr int kVectors = kHasGrad<Grad> ? 4 : 8;
template <typename Grad>
constexpr int kStageMinBlocks = kHasGrad<Grad> ? 4 : 3;  // a multiprocessor: 64 or 80 registers

// Vectors of which something is kept, in order of their elements, until full warps can take them.
// They leave before a pass is read, when its registers are free.
constexpr uint32_t kRecords = 128, kFlushFrom = 48;
struct Records {
  alignas(16) float sums[kRecords][kVectorElements];
  uint32_t which[kRecords];  // offset in the warp's tile << 2 | which of the four are kept
};

// A warp stages its tile pass by pass: it reads, adds, marks what passes, collects that, and writes
// the rest. A vector with an entry is written with the entry: until then the residual has what was
// there, which is what it keeps if the sum is not finite. What passes and cannot be sent, in e3m0,
// is staged as well, so that the second kernel can count it.
template <typename Grad, typename Format>
struct WarpStager {
  static constexpr int kOwn = kVectors<Grad> * kVectorElements;  // of a lane in a pass
  static constexpr int kPass = kWarpSize * kOwn;

  const MaskPackArgs& args;
  const Staging& staging;
  Records& records;
  int64_t begin;
  unsigned slot;
  const int& range;
  uint32_t passed = 0, staged = 0, waiting = 0;
  uint32_t unsent = 0;  // of this lane: what passes and cannot be sent
  bool non_finite = false;

  // `length`: elements of the tile, in `segments`.
  __device__ WarpCount run(const Segments& segments, int length, bool aligned) {
    if (segments.skipped()) return {0, 0, uint32_t(staging.warp_tile()) / kRow};
    const int done = stage(segments, aligned ? length / kPass * kPass : 0);
    flush();
    // The rest, which the second kernel places: entries behind it, and the header, need its count.
    const Format format(args, range);
    const auto count = [&](int64_t, float sum, bool, bool passing) {
      passed += __popc(__ballot_sync(kFullWarp, passing));
      unsent += passing && !format.sends(sum);
      non_finite |= passing && !is_finite(sum);
    };
    for_each_element<Grad>(args, segments, begin, done, length, count);
    if (Format::kE3M0) unsent = __reduce_add_sync(kFullWarp, unsent);
    return {passed - unsent, staged, uint32_t(done) / kRow};
  }

  // Stages whole passes up to `end`, as long as there is room. How much a pass keeps is known
  // before anything of it is written: the second kernel must find what is left out as it was.
  __device__ int stage(const Segments& segments, int end) {
    const float scale = args.inv_scale != nullptr ? *args.inv_scale : 1.0f;
    const bool plain = segments.one() && segments.tau < kInfinity;
    const int lane = lane_index() * kVectorElements;
    float* residual = args.residual + begin + lane;
    const Grad* grad = static_cast<const Grad*>(args.grad) + (kHasGrad<Grad> ? begin + lane : 0);
    int pass = 0;
    for (; pass < end; pass += kPass, residual += kPass, grad += kPass) {
      if (waiting >= kFlushFrom) flush();
      float sums[kVectors<Grad>][kVectorElements];
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
      uint32_t keeps = 0;  // bit 4 * v + e
      if (plain) {
        // |sum| - tau has no sign if the sum passes: one addition and one shift each. A NaN has
        // none. Needs gradual underflow, and inf - inf is a NaN of either sign.
#pragma unroll
        for (int i = kOwn - 1; i >= 0; --i) {
          const float sum = sums[i / kVectorElements][i % kVectorElements];
          keeps = __funnelshift_l(float_to_bits(__fsub_rn(fabsf(sum), segments.tau)), keeps, 1);
        }
        keeps = ~keeps & 0xffffffff >> (32 - kOwn);
      } else {
        const int64_t first = begin + pass;
        const Segments own = find_segments(args, segments, first, first + kPass);
        for (int s = 0, from = -kRow, to; s < own.count; ++s, from = to) {
          const float tau = effective(args.threshold[own.first + s]);
          const int64_t next = segment_begin(args, own.first + s + 1) - first - lane;
          to = s + 1 < own.count ? static_cast<int>(min(max(next, int64_t{-kRow}), int64_t{kPass}))
                                 : kPass;
          if (tau < 0.0f) keeps = ~0u;  // not to be written: more than there is room for
#pragma unroll
          for (int i = 0; i < kOwn; ++i) {
            const int v = i / kVectorElements, e = i % kVectorElements, at = v * kRow + e;
            if (from <= at && at < to && passes(sums[v][e], tau)) keeps |= 1u << i;
          }
        }
      }
      const uint32_t of_pass = __reduce_add_sync(kFullWarp, __popc(keeps));
      if (waiting + of_pass > kRecords || passed + of_pass > staging.room) break;
      passed += of_pass;
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

  __device__ void collect(const float (&sums)[kVectors<Grad>][kVectorElements], uint32_t keeps,
                          int offset) {
    const uint32_t below = (1u << lane_index()) - 1;
#pragma unroll
    for (int v = 0; v < kVectors<Grad>; ++v) {
      const uint32_t of_vector = keeps >> (4 * v) & 15;
      const uint32_t lanes = __ballot_sync(kFullWarp, of_vector != 0);
      if (of_vector != 0) {
        const uint32_t at = waiting + __popc(lanes & below);
        memcpy(records.sums[at], sums[v], sizeof(sums[v]));
        records.which[at] = (offset + v * kRow) << 2 | of_vector;
      }
      waiting += __popc(lanes);
    }
  }

  // Moves what has been collected to the slot, and what that leaves to the residual.
  __device__ void flush() {
    const Format format(args, range);
    const Sink entries = staging.slot(slot, format.dtype);
    __syncwarp();
    for (uint32_t first = 0; first < waiting; first += kWarpSize) {
      const uint32_t at = first + lane_index();
      const uint32_t which = at < waiting ? records.which[at] : 0, offset = which >> 4 << 2;
      const uint32_t own = __popc(which & 15), up_to = warp_inclusive_sum(own);
      uint32_t entry = staged + up_to - own;
      staged += __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
      if (which == 0) continue;
      float* residual = args.residual + begin + offset;
      float (&sums)[kVectorElements] = records.sums[at];
      for (uint32_t left = which & 15; left != 0; left &= left - 1) {
        const int e = __ffs(static_cast<int>(left)) - 1;
        const bool finite = is_finite(sums[e]);
        const Taken taken = format.take(sums[e]);
        entries.put(entry, begin + offset + e, taken.bits);
        unsent += !format.is_sent(taken.bits);
        sums[e] = finite ? taken.left : finite_or_zero(residual[e]);
        non_finite |= !finite;
        ++entry;
      }
      stream_out(residual, sums);
    }
    __syncwarp();
    waiting = 0;
  }
};

template <typename Grad, typename Format>
__global__ void __launch_bounds__(kThreads, kStageMinBlocks<Grad>)
    mask_pack_stage_kernel(MaskPackArgs args, RangeTiles tiles, Staging staging, bool aligned) {
  struct Shared {
    Records records[kWarps];
    Range tile;
    Segments segments;  // of the tile
    int range;
    uint32_t sum;     // kept | warps << 16 | those with an entry that is not finite << 24
    uint32_t unsent;  // and warps << 16
  };
  DCT_SHARED(Shared, shared);
  const int lane = lane_index(), warp = warp_index();
  if (warp == 0) {
    const RangeTiles::Tile at = tiles.locate(blockIdx.x);
    const Range tile = at.bounds;
    const Segments found = find_segments(args, all_segments(args), tile.begin, tile.end);
    if (lane == 0) {
      shared.tile = tile;
      shared.segments = found;
      shared.range = at.range;
      shared.sum = shared.unsent = 0;
    }
  }
  // The words of the segments, for the second kernel; and segments without elements, which lie in
  // no tile.
  for (int64_t s = int64_t{blockIdx.x} * kThreads + thread_index(); s < args.num_segments;
       s += int64_t{gridDim.x} * kThreads) {
    staging.segments[s] = 0;
    if (segment_begin(args, s) >= segment_begin(args, s + 1)) args.seen[s] = 0;
  }
  __syncthreads();

  const unsigned slot = blockIdx.x * kWarps + warp;
  const int64_t begin = shared.tile.begin + warp * staging.warp_tile();
  const int length = min(static_cast<int>(shared.tile.end - begin), staging.warp_tile());
  WarpStager<Grad, Format> stager = {args,  staging, shared.records[warp],
                                     begin, slot,    shared.range};
  const WarpCount counted =
      stager.run(find_segments(args, shared.segments, begin, begin + length), length, aligned);
  const bool non_finite = __any_sync(kFullWarp, stager.non_finite) != 0;
  if (lane != 0) return;
  staging.counts[slot] = counted;
  // The last warp to arrive has the sum: nobody waits for the slowest.
  const uint32_t own = counted.kept | 1u << 16 | uint32_t{non_finite} << 24;
  const uint32_t sum = atomicAdd(&shared.sum, own) + own;
  if ((sum >> 16 & 255) == kWarps) {
    staging.totals[blockIdx.x] = (sum & 0xffff) | uint32_t{sum >> 24 != 0} << 31;
  }
  if constexpr (Format::kE3M0) {
    const uint32_t unsent = atomicAdd(&shared.unsent, stager.unsent | 1u << 16) + stager.unsent;
    if (unsent >> 16 == kWarps - 1) staging.unsent[blockIdx.x] = unsent & 0xffff;
  }
}

}  // namespace dct::cuda
