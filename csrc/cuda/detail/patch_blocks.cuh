#pragma once

// The numbers of the blocks of a weight patch, and the division of its blocks among warps.

#include "../../common/ops.h"
#include "../../common/patch.h"
#include "scan.cuh"

namespace dct::cuda {

// The blocks of a patch, split evenly among the warps of a grid that is resident at once.
struct PatchGrid {
  int64_t blocks, per_warp, thread_blocks;

  explicit PatchGrid(int64_t numel) : blocks(patch_blocks(numel)) {
    constexpr int64_t kResident = 4;
    const int64_t most = kResident * multiprocessors();
    per_warp = blocks > 0 ? ceil_div(blocks, most * kWarps) : 1;
    thread_blocks = blocks > 0 ? ceil_div(blocks, per_warp * kWarps) : 1;
  }
  // The first block of a warp of this thread block. That of warp kWarps is the end.
  __device__ int64_t first_of(int warp) const {
    return min((int64_t{blockIdx.x} * kWarps + warp) * per_warp, blocks);
  }
};

// Calls visit(b, numbers[b]) for one thread's part of blocks [begin, end), 16 bytes at a time.
template <typename Visit>
__device__ void for_each_numbers(const BlockNumbers* numbers, int64_t begin, int64_t end,
                                 int thread, int threads, Visit visit) {
#pragma unroll 4
  for (int64_t q = begin / 4 + thread; q < end / 4; q += threads) {
    const uint4 four = *reinterpret_cast<const uint4*>(numbers + 4 * q);
    BlockNumbers each[4];
    memcpy(each, &four, sizeof(four));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (4 * q + i >= begin) visit(4 * q + i, each[i]);
    }
  }
  const int64_t rest = max(end / 4 * 4, begin) + thread;
  if (rest < end) visit(rest, numbers[rest]);
}

// The number of words before the first block of each warp. By all threads of a thread block.
__device__ inline Word words_before(const BlockNumbers* numbers, const PatchGrid& grid) {
  __shared__ Word warp_sums[kWarps];
  const int64_t first = grid.first_of(0);
  Word earlier = 0, own = 0;
  for_each_numbers(numbers, 0, first, thread_index(), kThreads,
                   [&](int64_t, BlockNumbers n) { earlier += n.words; });
  for_each_numbers(numbers, first, grid.first_of(warp_index()), lane_index(), kWarpSize,
                   [&](int64_t, BlockNumbers n) { own += n.words; });
  return reduce_warps<kWarps>(warp_sum(earlier), sum<Word>, warp_sums) + warp_sum(own);
}

}  // namespace dct::cuda
