// sample_threshold.cu -- radix select over the samples of every range, by one block per range. It
// finds three digits of the 31-bit magnitude, most significant first. If there are few samples, the
// same block also gathers their keys, and keeps them in registers. Otherwise a separate kernel,
// which uses more threads per range, gathers the keys first. The block then reads them from the L2
// cache, once per digit.
#include <algorithm>

#include "../common/hash.h"
#include "detail/elements.cuh"
#include "detail/radix_select.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

struct SamplePolicy {
  static constexpr int kSelectThreads = 512;
  static constexpr int kThreadKeys = 8;   // 16 sectors in flight per thread
  static constexpr int kThreadLoads = 4;  // vectors of gathered keys in flight per thread
  static constexpr int64_t kMostInRegisters = kSelectThreads * kThreadKeys;
  static constexpr int kGatherMinBlocks = 4;  // a thread has one sample
};

// The arguments and the length of a full range, so that threads need not repeat its division.
struct SampleArgs : SampleThresholdArgs {
  int64_t range_length;
  explicit SampleArgs(const SampleThresholdArgs& args)
      : SampleThresholdArgs(args), range_length(range_blocks(numel, ranges) * kBlock) {}
};

struct Samples {
  int64_t range, begin, numel, count;  // of the range; `count` is its number of samples

  __device__ Samples(const SampleArgs& args, int64_t range)
      : range(range), begin(min(range * args.range_length, args.numel)) {
    numel = min(args.range_length, args.numel - begin);
    count = min(numel, args.max_samples);
  }

  // The element of a sample.
  __device__ int64_t at(const SampleArgs& args, int64_t sample) const {
    if (count == numel) return begin + sample;
    return begin + stratified_pick(sample, numel, count, args.seed, static_cast<uint32_t>(range));
  }
};

// The keys of `samples` samples. Zeros fill the last vector of 16 bytes. They rank last.
__host__ __device__ int64_t padded_keys(int64_t samples) { return ceil_div(samples, 4) * 4; }

__host__ __device__ int64_t keys_per_range(const SampleArgs& args) {
  return padded_keys(min(args.max_samples, args.range_length));
}

// The number of ranges that are not empty, or 1.
int64_t gathered_ranges(const SampleArgs& args) {
  return args.numel > 0 ? ceil_div(args.numel, args.range_length) : 1;
}

// Gathers the keys of a range, one key per thread.
template <typename T>
__global__ void __launch_bounds__(kThreads, SamplePolicy::kGatherMinBlocks)
    gather_keys_kernel(SampleArgs args, int blocks_per_range, uint32_t* keys) {
  const Samples samples(args, blockIdx.x / blocks_per_range);
  const int64_t sample = int64_t{blockIdx.x % blocks_per_range} * kThreads + thread_index();
  if (sample >= padded_keys(samples.count)) return;
  uint32_t key = 0;
  if (sample < samples.count) {
    const int64_t at = samples.at(args, sample);
    const T grad = static_cast<const T*>(args.grad)[at];
    key = magnitude_key(accumulate(args.residual[at], grad, load_scale(args.inv_scale)));
  }
  keys[samples.range * keys_per_range(args) + sample] = key;
}

// each_key(visit) calls visit(key) for every key of the thread. By a block.
template <typename EachKey>
__device__ void write_threshold(const SampleArgs& args, const Samples& samples, EachKey each_key) {
  __shared__ RadixSelectShared<SamplePolicy::kSelectThreads> shared;
  uint32_t key = kFloat32Infinity;
  if (samples.count > 0) {
    const auto count = static_cast<double>(samples.count);
    const double rank = min(max(ceil(__dmul_rn(args.density, count)), 1.0), count);
    key = select_key<31>(static_cast<uint32_t>(rank), shared, each_key).digit;
  }
  if (thread_index() == 0) args.threshold[samples.range] = bits_to_float(key);
}

__global__ void __launch_bounds__(SamplePolicy::kSelectThreads)
    select_gathered_kernel(SampleArgs args, const uint32_t* keys) {
  const Samples samples(args, blockIdx.x);
  const auto* vectors = reinterpret_cast<const uint4*>(keys + samples.range * keys_per_range(args));
  write_threshold(args, samples, [&](auto visit) {
    constexpr int kLoads = SamplePolicy::kThreadLoads;
    constexpr int kStep = SamplePolicy::kSelectThreads;
    const int64_t count = padded_keys(samples.count) / 4;
    for (int64_t first = thread_index(); first < count; first += kLoads * kStep) {
      uint4 loaded[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int64_t v = first + i * kStep;
        loaded[i] = v < count ? vectors[v] : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        visit(loaded[i].x);
        visit(loaded[i].y);
        visit(loaded[i].z);
        visit(loaded[i].w);
      }
    }
  });
}

// Gathers the keys and selects from them. A thread past the end loads the last sample, and discards
// it.
template <typename T>
__global__ void __launch_bounds__(SamplePolicy::kSelectThreads)
    gather_and_select_kernel(SampleArgs args) {
  constexpr int kKeys = SamplePolicy::kThreadKeys;
  const Samples samples(args, blockIdx.x);
  uint32_t keys[kKeys] = {};
  if (samples.count > 0) {
    T grad[kKeys];
    float residual[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int64_t sample = i * SamplePolicy::kSelectThreads + thread_index();
      const int64_t at = samples.at(args, min(sample, samples.count - 1));
      grad[i] = static_cast<const T*>(args.grad)[at];
      residual[i] = args.residual[at];
    }
    const float scale = load_scale(args.inv_scale);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (i * SamplePolicy::kSelectThreads + thread_index() < samples.count) {
        keys[i] = magnitude_key(accumulate(residual[i], grad[i], scale));
      }
    }
  }
  write_threshold(args, samples, [&](auto visit) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (i % 4 == 0 && i * SamplePolicy::kSelectThreads >= samples.count) break;
      visit(keys[i]);
    }
  });
}

bool fit_in_registers(const SampleThresholdArgs& args) {
  return args.max_samples <= SamplePolicy::kMostInRegisters;
}

template <typename T>
cudaError_t select(const SampleArgs& args, uint32_t* keys, cudaStream_t stream) {
  constexpr int kSelectThreads = SamplePolicy::kSelectThreads;
  if (fit_in_registers(args)) {
    return launch(gather_and_select_kernel<T>, args.ranges, kSelectThreads, 0, stream, args);
  }
  const int64_t blocks = std::max<int64_t>(ceil_div(keys_per_range(args), kThreads), 1);
  const cudaError_t gathered = launch(gather_keys_kernel<T>, blocks * gathered_ranges(args),
                                      kThreads, 0, stream, args, static_cast<int>(blocks), keys);
  if (gathered != cudaSuccess) return gathered;
  return launch(select_gathered_kernel, args.ranges, kSelectThreads, 0, stream, args, keys);
}

}  // namespace

int64_t sample_threshold_scratch_bytes(const SampleThresholdArgs& args) {
  if (fit_in_registers(args)) return 0;
  const SampleArgs more(args);
  return static_cast<int64_t>(sizeof(uint32_t)) * gathered_ranges(more) * keys_per_range(more);
}

cudaError_t sample_threshold(const SampleThresholdArgs& args, void* scratch, cudaStream_t stream) {
  return dispatch(args.grad_dtype, [&](auto grad) {
    return select<decltype(grad)>(SampleArgs(args), static_cast<uint32_t*>(scratch), stream);
  });
}

}  // namespace dct::cuda
