#pragma once

// Radix select of the rank-th largest key: one pass, which finds one digit, and all passes.

#include "device.cuh"

namespace dct::cuda {

constexpr int kBins = 2048;

struct Digit {
  int shift, bits;
};

// The digits of keys of kKeyBits bits, most significant first.
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
  uint32_t digit;  // or, after all passes, the key
  uint32_t rank;   // the wanted key's rank among those with this digit
};

template <int kBlockThreads>
struct RadixSelectShared {
  uint32_t histogram[kBins];
  uint32_t warp_counts[kBlockThreads / kWarpSize];
  Selected selected;
};

// One pass, by a block. The single thread that finds the digit writes shared.selected. Clears the
// histogram; each thread reads only the bins that it clears.
template <int kBlockThreads>
__device__ void select_digit(uint32_t rank, RadixSelectShared<kBlockThreads>& shared) {
  constexpr int kThreadBins = kBins / kBlockThreads;
  // Thread 0 has the highest bins, because ranks count from the largest key.
  const int highest = kBins - 1 - thread_index() * kThreadBins;
  uint32_t bins[kThreadBins], thread_count = 0;
#pragma unroll
  for (int b = 0; b < kThreadBins; ++b) {
    thread_count += bins[b] = shared.histogram[highest - b];
    shared.histogram[highest - b] = 0;
  }
  const uint32_t inclusive = warp_inclusive_sum(thread_count);
  if (lane_index() == kWarpSize - 1) shared.warp_counts[warp_index()] = inclusive;
  __syncthreads();
  uint32_t exclusive = inclusive - thread_count;
  for (int w = 0; w < warp_index(); ++w) exclusive += shared.warp_counts[w];
  if (rank <= exclusive || rank > exclusive + thread_count) return;
  Selected selected;
  selected.rank = rank - exclusive;
#pragma unroll
  for (int b = 0; b < kThreadBins; ++b) {
    selected.digit = static_cast<uint32_t>(highest - b);
    if (selected.rank <= bins[b]) break;
    selected.rank -= bins[b];
  }
  shared.selected = selected;
}

// Selects the rank-th largest of the keys of a block, and its rank among equal keys.
// each_key(visit) must call visit(key) for every key of the thread, the same keys in every pass.
template <int kKeyBits, int kBlockThreads, typename EachKey>
__device__ Selected select_key(uint32_t rank, RadixSelectShared<kBlockThreads>& shared,
                               EachKey each_key) {
  using KeyDigits = Digits<kKeyBits>;
  uint32_t prefix = 0;
  for (int b = thread_index(); b < kBins; b += kBlockThreads) shared.histogram[b] = 0;
  for (int pass = 0; pass < KeyDigits::kPasses; ++pass) {
    const Digit digit = KeyDigits::at(pass);
    __syncthreads();
    each_key([&](uint32_t key) {
      if (key >> (digit.shift + digit.bits) != prefix) return;
      atomicAdd(&shared.histogram[key >> digit.shift & ((1u << digit.bits) - 1)], 1u);
    });
    __syncthreads();
    select_digit(rank, shared);
    __syncthreads();
    prefix = prefix << digit.bits | shared.selected.digit;
    rank = shared.selected.rank;
  }
  return {prefix, rank};
}

}  // namespace dct::cuda
