#pragma once

// sample_threshold with few picks. One block per range holds the keys in registers and finds all
// three digits. If there are very few keys, this block also gathers them. Otherwise a separate
// kernel, which uses more threads per range, gathers the keys first.

#include "radix_select.cuh"
#include "sample_picks.cuh"

namespace dct::cuda {

struct FewPicks {
  // The keys of a range fit the registers of one block, and all keys fit 4 MB. "Direct" means that
  // the block gathers the keys, with 16 sectors per thread in flight.
  static constexpr int kThreads = 512, kThreadKeys = 32, kDirectKeys = 8;
  static constexpr int64_t kMost = kThreads * kThreadKeys, kMostKeys = 1 << 20;
  static constexpr int64_t kMostDirect = kThreads * kDirectKeys;
};

// Gathers the keys of range r to keys[r * args.max_samples], one thread per pick.
template <typename T>
__global__ void __launch_bounds__(kThreads, kSampleMinBlocks)
    gather_keys_kernel(SampleArgs args, int per_range, uint32_t* keys) {
  const Picks picks(args, blockIdx.x / per_range);
  const int64_t pick = int64_t{blockIdx.x % per_range} * kThreads + thread_index();
  if (pick >= picks.count) return;
  const int64_t at = picks.at(args, pick);
  const T grad = static_cast<const T*>(args.grad)[at];
  const float sum = accumulate(args.residual[at], grad, load_scale(args.inv_scale));
  keys[picks.range * args.max_samples + pick] = magnitude_key(sum);
}

// Selects the threshold of a range from the keys in the registers of this block. Padding zeros rank
// last.
template <int kKeys>
__device__ void select_threshold(const SampleArgs& args, const Picks& picks,
                                 const uint32_t (&thread_keys)[kKeys],
                                 RadixSelectShared<FewPicks::kThreads>& shared) {
  const int count = static_cast<int>(picks.count);
  uint32_t key = kFloat32Infinity;
  if (count > 0) {
    key = select_key<31>(first_rank(args.density, count), shared, [&](auto visit) {
#pragma unroll
            for (int i = 0; i < kKeys; ++i) {
              if (i % 4 == 0 && i * FewPicks::kThreads >= count) break;
              visit(thread_keys[i]);
            }
          }).digit;
  }
  if (thread_index() == 0) args.threshold[picks.range] = bits_to_float(key);
}

// Selects from the gathered keys. Issues all loads of a thread before the first key is used.
__global__ void __launch_bounds__(FewPicks::kThreads)
    select_key_kernel(SampleArgs args, const uint32_t* keys) {
  __shared__ RadixSelectShared<FewPicks::kThreads> shared;
  const Picks picks(args, blockIdx.x);
  keys += picks.range * args.max_samples;
  uint32_t thread_keys[FewPicks::kThreadKeys];
#pragma unroll
  for (int i = 0; i < FewPicks::kThreadKeys; ++i) {
    const int pick = i * FewPicks::kThreads + thread_index();
    thread_keys[i] = pick < picks.count ? keys[pick] : 0;
  }
  select_threshold(args, picks, thread_keys, shared);
}

// Gathers the keys and selects from them. Threads past the end load the last pick and discard it.
template <typename T>
__global__ void __launch_bounds__(FewPicks::kThreads) select_pick_kernel(SampleArgs args) {
  __shared__ RadixSelectShared<FewPicks::kThreads> shared;
  const Picks picks(args, blockIdx.x);
  uint32_t thread_keys[FewPicks::kDirectKeys] = {};
  if (picks.count > 0) {
    T grad[FewPicks::kDirectKeys];
    float residual[FewPicks::kDirectKeys];
#pragma unroll
    for (int i = 0; i < FewPicks::kDirectKeys; ++i) {
      const int64_t pick = i * FewPicks::kThreads + thread_index();
      const int64_t at = picks.at(args, min(pick, picks.count - 1));
      grad[i] = static_cast<const T*>(args.grad)[at];
      residual[i] = args.residual[at];
    }
    const float scale = load_scale(args.inv_scale);
#pragma unroll
    for (int i = 0; i < FewPicks::kDirectKeys; ++i) {
      const int64_t pick = i * FewPicks::kThreads + thread_index();
      if (pick < picks.count) {
        thread_keys[i] = magnitude_key(accumulate(residual[i], grad[i], scale));
      }
    }
  }
  select_threshold(args, picks, thread_keys, shared);
}

}  // namespace dct::cuda
