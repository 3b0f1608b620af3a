// sample_threshold.cu -- radix select over the picks of every range: three digits of the 31-bit
// magnitude, most significant first.
//
// Few picks: one block per range holds their keys in registers and finds all three digits. In the
// smallest case it gathers the keys itself (one kernel), else a first kernel gathers them with the
// whole device. Many picks: one kernel per digit. The blocks of a range add to its histogram the
// picks that match the digits found so far; the last block to finish selects the next digit. Each
// pass gathers the picks again, from the cache, rather than store their keys.
#include <algorithm>
#include <cmath>

#include "../common/floats.h"
#include "../common/hash.h"
#include "../common/payload.h"
#include "detail/device.cuh"
#include "detail/elements.cuh"
#include "detail/radix_select.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

struct Policy {
  static constexpr int kMinBlocks = 4;
  static constexpr int kInFlight = 4;  // picks per thread before the first is counted
  // Blocks per range: one for so many picks, but no more than fill the device.
  static constexpr int kPicks = kThreads * kInFlight;
  static constexpr int kMaxBlocks = 2048, kMinPerRange = 8;
  // Few picks: a range's keys fit the registers of one block, and all keys fit 4 MB. Direct: so
  // few that the block gathers them itself, 16 sectors per thread in flight.
  static constexpr int kFewThreads = 512, kThreadKeys = 32, kDirectKeys = 8;
  static constexpr int64_t kFewPicks = kFewThreads * kThreadKeys, kFewKeys = 1 << 20;
  static constexpr int64_t kDirectPicks = kFewThreads * kDirectKeys;
};

bool are_few(const SampleThresholdArgs& args) {
  return args.max_samples <= Policy::kFewPicks &&
         args.ranges <= Policy::kFewKeys / args.max_samples;
}

bool are_direct(const SampleThresholdArgs& args) {
  return args.max_samples <= Policy::kDirectPicks;
}

using MagnitudeDigits = Digits<31>;
constexpr int kPasses = MagnitudeDigits::kPasses;

struct RangeState {
  uint32_t histogram[kBins];
  uint32_t prefix;         // digits found so far
  uint32_t rank;           // rank of the k-th largest among keys with this prefix
  unsigned done[kPasses];  // blocks that have counted, in each pass
};

struct Shared {
  uint32_t histogram[kBins];
  SelectStorage<kThreads> select;
  bool last;
};

// The arguments, with the length of a full range: a division that no thread repeats.
struct Args : SampleThresholdArgs {
  int64_t range_length;
  explicit Args(const SampleThresholdArgs& args)
      : SampleThresholdArgs(args), range_length(range_blocks(numel, ranges) * kBlock) {}
};

struct Picks {
  int64_t range, begin, numel, count;  // of the range, and how many picks it has

  __device__ Picks(const Args& args, int64_t range)
      : range(range), begin(min(range * args.range_length, args.numel)) {
    numel = min(args.range_length, args.numel - begin);
    count = min(numel, args.max_samples);
  }

  // The element that a pick is.
  __device__ int64_t at(const Args& args, int64_t pick) const {
    if (count == numel) return begin + pick;
    return begin + stratified_pick(pick, numel, count, args.seed, static_cast<uint32_t>(range));
  }
};

__device__ uint32_t first_rank(double density, int64_t picks) {
  const double wanted = ceil(__dmul_rn(density, static_cast<double>(picks)));
  return static_cast<uint32_t>(min(max(wanted, 1.0), static_cast<double>(picks)));
}

// Gathers the keys of range r to keys[r * args.max_samples], one thread per pick.
template <typename T>
__global__ void __launch_bounds__(kThreads, Policy::kMinBlocks)
    gather_keys_kernel(Args args, int per_range, uint32_t* keys) {
  const Picks picks(args, blockIdx.x / per_range);
  const int64_t pick = int64_t{blockIdx.x % per_range} * kThreads + thread_index();
  if (pick >= picks.count) return;
  const int64_t at = picks.at(args, pick);
  const T grad = static_cast<const T*>(args.grad)[at];
  const float sum = accumulate(args.residual[at], grad, load_scale(args.inv_scale));
  keys[picks.range * args.max_samples + pick] = magnitude_key(sum);
}

// Selects a range's threshold from the keys in this block's registers. They are padded with zeros,
// which rank last.
template <int kKeys>
__device__ void select_threshold(const Args& args, const Picks& picks,
                                 const uint32_t (&thread_keys)[kKeys],
                                 RadixSelectShared<Policy::kFewThreads>& shared) {
  const int count = static_cast<int>(picks.count);
  uint32_t key = kFloat32Infinity;
  if (count > 0) {
    key = select_key<31>(first_rank(args.density, count), shared, [&](auto visit) {
#pragma unroll
            for (int i = 0; i < kKeys; ++i) {
              if (i % 4 == 0 && i * Policy::kFewThreads >= count) break;
              visit(thread_keys[i]);
            }
          }).digit;
  }
  if (thread_index() == 0) args.threshold[picks.range] = bits_to_float(key);
}

// Selects from gathered keys. All loads of a thread are issued before the first key is used.
__global__ void __launch_bounds__(Policy::kFewThreads)
    select_key_kernel(Args args, const uint32_t* keys) {
  __shared__ RadixSelectShared<Policy::kFewThreads> shared;
  const Picks picks(args, blockIdx.x);
  keys += picks.range * args.max_samples;
  uint32_t thread_keys[Policy::kThreadKeys];
#pragma unroll
  for (int i = 0; i < Policy::kThreadKeys; ++i) {
    const int pick = i * Policy::kFewThreads + thread_index();
    thread_keys[i] = pick < picks.count ? keys[pick] : 0;
  }
  select_threshold(args, picks, thread_keys, shared);
}

// Gathers the keys and selects from them. Threads past the end load the last pick again and discard
// it.
template <typename T>
__global__ void __launch_bounds__(Policy::kFewThreads) select_pick_kernel(Args args) {
  __shared__ RadixSelectShared<Policy::kFewThreads> shared;
  const Picks picks(args, blockIdx.x);
  uint32_t thread_keys[Policy::kDirectKeys] = {};
  if (picks.count > 0) {
    T grad[Policy::kDirectKeys];
    float residual[Policy::kDirectKeys];
#pragma unroll
    for (int i = 0; i < Policy::kDirectKeys; ++i) {
      const int64_t pick = i * Policy::kFewThreads + thread_index();
      const int64_t at = picks.at(args, min(pick, picks.count - 1));
      grad[i] = static_cast<const T*>(args.grad)[at];
      residual[i] = args.residual[at];
    }
    const float scale = load_scale(args.inv_scale);
#pragma unroll
    for (int i = 0; i < Policy::kDirectKeys; ++i) {
      const int64_t pick = i * Policy::kFewThreads + thread_index();
      if (pick < picks.count) {
        thread_keys[i] = magnitude_key(accumulate(residual[i], grad[i], scale));
      }
    }
  }
  select_threshold(args, picks, thread_keys, shared);
}

// Adds one digit of a block's picks to the histogram. All addresses are computed before the first
// load, and all loads issued before the first key is computed. Past the end the last pick is loaded
// again.
template <typename T>
__device__ void count(const Args& args, const Picks& picks, int64_t blocks, int64_t block,
                      Digit digit, uint32_t prefix, uint32_t* histogram) {
  const float scale = load_scale(args.inv_scale);
  const int64_t stride = blocks * kThreads;
  const int64_t first = block * kThreads + thread_index();
  for (int64_t pick = first; pick < picks.count; pick += stride * Policy::kInFlight) {
    int64_t at[Policy::kInFlight];
    T grad[Policy::kInFlight];
    float residual[Policy::kInFlight];
#pragma unroll
    for (int q = 0; q < Policy::kInFlight; ++q) {
      at[q] = picks.at(args, min(pick + q * stride, picks.count - 1));
    }
#pragma unroll
    for (int q = 0; q < Policy::kInFlight; ++q) {
      grad[q] = static_cast<const T*>(args.grad)[at[q]];
      residual[q] = args.residual[at[q]];
    }
#pragma unroll
    for (int q = 0; q < Policy::kInFlight; ++q) {
      if (pick + q * stride >= picks.count) break;
      const uint32_t key = magnitude_key(accumulate(residual[q], grad[q], scale));
      if (key >> (digit.shift + digit.bits) != prefix) continue;
      atomicAdd(&histogram[key >> digit.shift & ((1u << digit.bits) - 1)], 1u);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, Policy::kMinBlocks)
    sample_threshold_kernel(Args args, int per_range, RangeState* states, int pass) {
  __shared__ Shared shared;
  const Picks picks(args, blockIdx.x / per_range);
  const int64_t wanted = (picks.count + Policy::kPicks - 1) / Policy::kPicks;
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

template <typename T>
cudaError_t run_few(const Args& args, uint32_t* keys, cudaStream_t stream) {
  if (are_direct(args)) {
    return launch(select_pick_kernel<T>, args.ranges, Policy::kFewThreads, 0, stream, args);
  }
  const int64_t picks = std::min(args.max_samples, args.range_length);
  const int64_t per_range = std::max<int64_t>(ceil_div(picks, kThreads), 1);
  const cudaError_t gathered = launch(gather_keys_kernel<T>, args.ranges * per_range, kThreads, 0,
                                      stream, args, static_cast<int>(per_range), keys);
  if (gathered != cudaSuccess) return gathered;
  return launch(select_key_kernel, args.ranges, Policy::kFewThreads, 0, stream, args, keys);
}

template <typename T>
cudaError_t run_many(const Args& args, RangeState* states, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(states, 0, sizeof(RangeState) * args.ranges, stream);
  if (cleared != cudaSuccess) return cleared;
  const int64_t picks = std::min(args.max_samples, args.range_length);
  const int64_t most = std::max<int64_t>(Policy::kMaxBlocks / args.ranges, Policy::kMinPerRange);
  const int64_t per_range = std::max<int64_t>(std::min(ceil_div(picks, Policy::kPicks), most), 1);
  for (int pass = 0; pass < kPasses; ++pass) {
    const cudaError_t launched =
        launch(sample_threshold_kernel<T>, per_range * args.ranges, kThreads, 0, stream, args,
               static_cast<int>(per_range), states, pass);
    if (launched != cudaSuccess) return launched;
  }
  return cudaSuccess;
}

}  // namespace

int64_t sample_threshold_scratch_bytes(const SampleThresholdArgs& args) {
  if (!are_few(args)) return static_cast<int64_t>(sizeof(RangeState)) * args.ranges;
  if (are_direct(args)) return 0;
  return static_cast<int64_t>(sizeof(uint32_t)) * args.ranges * args.max_samples;
}

cudaError_t sample_threshold(const SampleThresholdArgs& args, void* scratch, cudaStream_t stream) {
  return dispatch(args.grad_dtype, [&](auto grad) {
    using T = decltype(grad);
    return are_few(args) ? run_few<T>(Args(args), static_cast<uint32_t*>(scratch), stream)
                         : run_many<T>(Args(args), static_cast<RangeState*>(scratch), stream);
  });
}

}  // namespace dct::cuda
