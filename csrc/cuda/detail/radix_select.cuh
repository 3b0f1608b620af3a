#pragma once

// One step of a radix select from the largest: which digit the rank-th largest has.

#include "warp.cuh"

namespace dct::cuda {

constexpr int kSelectThreads = 256;
constexpr int kBins = 2048;

struct Digit {
  int shift, bits;
};

// The digits of keys of kKeyBits, the highest first.
template <int kKeyBits>
struct Digits {
  static constexpr int kBits = 11, kPasses = (kKeyBits + kBits - 1) / kBits;
  static_assert(kBins == 1 << kBits, "a bin for each value of a digit");

  __device__ static Digit at(int pass) {
    const int shift = max(kKeyBits - kBits * (pass + 1), 0);
    return {shift, kKeyBits - kBits * pass - shift};
  }
};

struct Selected {
  uint32_t digit;
  uint32_t rank;  // what is looked for is the rank-th largest of those with this digit
};

struct SelectStorage {
  uint32_t warp_count[kSelectThreads / kWarpSize];
};

// By a block of kSelectThreads: true in the one thread that finds the digit. Clears the histogram,
// [kBins], of which each thread reads only what it clears.
__device__ inline bool select_digit(uint32_t* histogram, uint32_t rank, SelectStorage& storage,
                                    Selected& selected) {
  constexpr int kThreadBins = kBins / kSelectThreads;
  // Thread 0 has the highest bins, so that ranks count from the largest.
  const int highest = kBins - 1 - thread_index() * kThreadBins;
  uint32_t bins[kThreadBins], own = 0;
#pragma unroll
  for (int b = 0; b < kThreadBins; ++b) {
    own += bins[b] = histogram[highest - b];
    histogram[highest - b] = 0;
  }
  const uint32_t up_to = warp_inclusive_sum(own);
  if (lane_index() == kWarpSize - 1) storage.warp_count[warp_index()] = up_to;
  __syncthreads();
  uint32_t before = up_to - own;
  for (int w = 0; w < warp_index(); ++w) before += storage.warp_count[w];
  if (rank <= before || rank > before + own) return false;
  selected.rank = rank - before;
#pragma unroll
  for (int b = 0; b < kThreadBins; ++b) {
    selected.digit = static_cast<uint32_t>(highest - b);
    if (selected.rank <= bins[b]) break;
    selected.rank -= bins[b];
  }
  return true;
}

}  // namespace dct::cuda
