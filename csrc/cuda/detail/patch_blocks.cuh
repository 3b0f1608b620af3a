#pragma once

// Blocks of weight patches: loads and hashes of 16-bit entries, and the numbers of words.

#include "../../common/ops.h"
#include "../../common/patch.h"
#include "device.cuh"

namespace dct::cuda {

constexpr int kEight = 8;                         // adjacent entries of a lane, 16 bytes
constexpr int kWarpEntries = kWarpSize * kEight;  // that a warp loads at once
constexpr int kHalves = 2;                        // such loads of each warp per block
static_assert(kPatchBlock == kWarps * kHalves * kWarpEntries, "a thread block loads a block");

// The bits of eight entries, packed in pairs.
struct Eight {
  uint32_t pairs[kEight / 2];

  __device__ uint32_t entry(int e) const { return pairs[e / 2] >> (16 * (e % 2)) & 0xffff; }
};

// The bits of a weight. Half is the dtype of a rounded float32.
template <typename Half>
__device__ uint32_t bits_of(float x) {
  return round_to<Half>(x).bits;
}
template <typename Half>
__device__ uint32_t bits_of(uint16_t x) {
  return x;
}

// Loads the bits of eight entries from `index` on. With kWhole, there are eight at a multiple of 16
// bytes. Otherwise, entries past `numel` are 0. Callers branch once for several calls, so that the
// loads of all calls are in flight together.
template <typename Half, bool kWhole, typename Weight>
__device__ void load_eight(const Weight* x, int64_t index, int64_t numel, Eight& bits) {
  if constexpr (!kWhole) {
#pragma unroll
    for (int e = 0; e < kEight; e += 2) {
      const uint32_t low = index + e < numel ? bits_of<Half>(x[index + e]) : 0;
      const uint32_t high = index + e + 1 < numel ? bits_of<Half>(x[index + e + 1]) : 0;
      bits.pairs[e / 2] = low | high << 16;
    }
  } else if constexpr (sizeof(Weight) == sizeof(uint16_t)) {
    stream_in(reinterpret_cast<const uint32_t*>(x + index), bits.pairs);
  } else {
    Weight loaded[2][kEight / 2];
    stream_in(x + index, loaded[0]);
    stream_in(x + index + kEight / 2, loaded[1]);
#pragma unroll
    for (int e = 0; e < kEight; e += 2) {
      const Weight* pair = loaded[e / 4] + e % 4;
      bits.pairs[e / 2] = bits_of<Half>(pair[0]) | bits_of<Half>(pair[1]) << 16;
    }
  }
}

// The sum of the hashes of eight entries, of which the first `inside` are in the tensor.
__device__ inline Word hash_eight(const Eight& bits, int position, int64_t inside) {
  static_assert(kHashed == 4, "two pairs");
  Word sum = 0;
#pragma unroll
  for (int g = 0; g < kEight / kHashed; ++g) {
    const Word four = bits.pairs[2 * g] | Word{bits.pairs[2 * g + 1]} << 32;
    if (g * kHashed < inside) sum += group_hash(four, position / kHashed + g);
  }
  return sum;
}

// Adds the hashes of a block to a checksum. By all threads of a thread block.
__device__ inline void add_hashes(Word hashes, int64_t block, int64_t* checksum,
                                  Word (&warp_sums)[kWarps]) {
  hashes = warp_sum(hashes);
  if (lane_index() == 0) warp_sums[warp_index()] = hashes;
  __syncthreads();
  if (thread_index() != 0) return;
  Word sum = 0;
  for (Word each : warp_sums) sum += each;
  atomicAdd(reinterpret_cast<Word*>(checksum), sum * block_factor(block));
}

__host__ __device__ inline BlockNumbers* block_numbers(uint8_t* patch) {
  return reinterpret_cast<BlockNumbers*>(patch + sizeof(PayloadHeader));
}

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
__device__ inline Word words_before(const BlockNumbers* numbers, const PatchGrid& grid,
                                    Word (&warp_sums)[kWarps]) {
  Word sum = 0;
  const auto add = [&](int64_t, BlockNumbers n) { sum += n.words; };
  for_each_numbers(numbers, 0, grid.first_of(0), thread_index(), kThreads, add);
  sum = warp_sum(sum);
  if (lane_index() == 0) warp_sums[warp_index()] = sum;
  __syncthreads();
  sum = lane_index() < kWarps ? warp_sums[lane_index()] : 0;
  for_each_numbers(numbers, grid.first_of(0), grid.first_of(warp_index()), lane_index(), kWarpSize,
                   add);
  return warp_sum(sum);
}

}  // namespace dct::cuda
