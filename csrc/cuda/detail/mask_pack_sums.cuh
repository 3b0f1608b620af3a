#pragma once

// What a block of mask_pack's second kernel knows of all tiles before its last.

#include "mask_pack_tile.cuh"

namespace dct::cuda {

// Kept by the tiles of a range before a block's, and by these, which leave so many unsent; and
// whether one that passes is not finite.
struct Sums {
  Word before, own, unsent;
  uint32_t non_finite;
};

// By one block, that has tiles [first, last): 4 bytes for each up to its last, from the cache. The
// range's last block sees them all, so that what it writes into the header is exact.
template <typename Format>
__device__ Sums sum_totals(const uint32_t* totals, const uint32_t* unsent, unsigned first,
                           unsigned last, Sums (&of_warps)[kWarps]) {
  Sums sum = {};
#pragma unroll 8
  for (unsigned t = thread_index(); t < last; t += kThreads) {
    const uint32_t total = totals[t];
    (t < first ? sum.before : sum.own) += total & 0xffff;
    if (Format::kE3M0 && t >= first) sum.unsent += unsent[t];
    sum.non_finite |= total >> 31;
  }
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    sum.before += __shfl_xor_sync(kFullWarp, sum.before, distance);
    sum.own += __shfl_xor_sync(kFullWarp, sum.own, distance);
    if (Format::kE3M0) sum.unsent += __shfl_xor_sync(kFullWarp, sum.unsent, distance);
  }
  sum.non_finite = __any_sync(kFullWarp, sum.non_finite) != 0;
  if (lane_index() == 0) of_warps[warp_index()] = sum;
  __syncthreads();
  sum = {};
  for (const Sums& of_warp : of_warps) {
    sum.before += of_warp.before;
    sum.own += of_warp.own;
    if (Format::kE3M0) sum.unsent += of_warp.unsent;
    sum.non_finite |= of_warp.non_finite;
  }
  return sum;
}

}  // namespace dct::cuda
