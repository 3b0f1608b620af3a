#pragma once

// sample_threshold with many picks, with one kernel per digit. In each pass, the blocks of
// a range build a histogram of the next digit, over the picks that match the digits found so far.
// The last block to finish selects the digit. Each pass gathers the picks again, from the cache,
// instead of storing their keys.

#include "radix_select.cuh"
#include "sample_picks.cuh"

namespace dct::cuda {

struct ManyPicks {
  static constexpr int kInFlight = 4;  // picks that a thread loads before it counts the first
  // Blocks per range: one per kPicks picks, but at most an equal share of kMaxBlocks, or
  // kMinPerRange if that is more.
  static constexpr int kPicks = kThreads * kInFlight;
  static constexpr int kMaxBlocks = 2048, kMinPerRange = 8;
};

using MagnitudeDigits = Digits<31>;
constexpr int kPasses = MagnitudeDigits::kPasses;

struct RangeState {
  uint32_t histogram[kBins];
  uint32_t prefix;         // digits found so far
  uint32_t rank;           // rank of the k-th largest among keys with this prefix
  unsigned done[kPasses];  // blocks that have finished counting, per pass
};

struct Shared {
  uint32_t histogram[kBins];
  SelectStorage<kThreads> select;
  bool last;
};

// Adds one digit of a block's picks to the histogram, if they match `prefix`. Computes all
// addresses before the first load, and issues all loads before the first key is computed. A thread
// past the end loads the last pick and discards it.
template <typename T>
__device__ void count(const SampleArgs& args, const Picks& picks, int64_t blocks, int64_t block,
                      Digit digit, uint32_t prefix, uint32_t* histogram) {
  const float scale = load_scale(args.inv_scale);
  const int64_t stride = blocks * kThreads;
  const int64_t first = block * kThreads + thread_index();
  for (int64_t pick = first; pick < picks.count; pick += stride * ManyPicks::kInFlight) {
    int64_t at[ManyPicks::kInFlight];
    T grad[ManyPicks::kInFlight];
    float residual[ManyPicks::kInFlight];
#pragma unroll
    for (int q = 0; q < ManyPicks::kInFlight; ++q) {
      at[q] = picks.at(args, min(pick + q * stride, picks.count - 1));
    }
#pragma unroll
    for (int q = 0; q < ManyPicks::kInFlight; ++q) {
      grad[q] = static_cast<const T*>(args.grad)[at[q]];
      residual[q] = args.residual[at[q]];
    }
#pragma unroll
    for (int q = 0; q < ManyPicks::kInFlight; ++q) {
      if (pick + q * stride >= picks.count) break;
      const uint32_t key = magnitude_key(accumulate(residual[q], grad[q], scale));
      if (key >> (digit.shift + digit.bits) != prefix) continue;
      atomicAdd(&histogram[key >> digit.shift & ((1u << digit.bits) - 1)], 1u);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kSampleMinBlocks)
    sample_threshold_kernel(SampleArgs args, int per_range, RangeState* states, int pass) {
  __shared__ Shared shared;
  const Picks picks(args, blockIdx.x / per_range);
  const int64_t wanted = (picks.count + ManyPicks::kPicks - 1) / ManyPicks::kPicks;
  const int64_t blocks = min(max(wanted, int64_t{1}), int64_t{per_range});
  const int64_t block = blockIdx.x % per_range;
  if (block >= blocks) return;
  if (picks.count == 0) {
    if (thread_index() == 0) args.threshold[picks.range] = bits_to_float(kFloat32Infinity);
    return;
  }
  const Digit digit = MagnitudeDigits::at(pass);
  RangeState& state = states[picks.range];
  const uint32_t prefix = state.prefix;  // cleared to 0 before the first pass
  const uint32_t rank = pass == 0 ? first_rank(args.density, picks.count) : state.rank;

  for (int b = thread_index(); b < kBins; b += kThreads) shared.histogram[b] = 0;
  __syncthreads();
  count<T>(args, picks, blocks, block, digit, prefix, shared.histogram);
  __syncthreads();
  for (int b = thread_index(); b < kBins; b += kThreads) {
    if (shared.histogram[b] > 0) atomicAdd(&state.histogram[b], shared.histogram[b]);
  }
  __syncthreads();
  if (thread_index() == 0) {
    shared.last = add_acquire_release(&state.done[pass], 1) == blocks - 1;
  }
  __syncthreads();
  if (!shared.last) return;

  Selected selected;
  if (!select_digit(state.histogram, rank, shared.select, selected)) return;
  state.prefix = prefix << digit.bits | selected.digit;
  state.rank = selected.rank;
  if (pass == kPasses - 1) args.threshold[picks.range] = bits_to_float(state.prefix);
}

}  // namespace dct::cuda
