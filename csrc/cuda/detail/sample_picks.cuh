#pragma once

// The picks of sample_threshold: their elements, and the rank to select among them.

#include "../../common/hash.h"
#include "../../common/ops.h"
#include "elements.cuh"

namespace dct::cuda {

constexpr int kSampleMinBlocks = 4;  // for kernels with one or several picks per thread

// The arguments and the length of a full range, so that threads need not repeat its division.
struct SampleArgs : SampleThresholdArgs {
  int64_t range_length;
  explicit SampleArgs(const SampleThresholdArgs& args)
      : SampleThresholdArgs(args), range_length(range_blocks(numel, ranges) * kBlock) {}
};

struct Picks {
  int64_t range, begin, numel, count;  // of the range; `count` is its number of picks

  __device__ Picks(const SampleArgs& args, int64_t range)
      : range(range), begin(min(range * args.range_length, args.numel)) {
    numel = min(args.range_length, args.numel - begin);
    count = min(numel, args.max_samples);
  }

  // The element of a pick.
  __device__ int64_t at(const SampleArgs& args, int64_t pick) const {
    if (count == numel) return begin + pick;
    return begin + stratified_pick(pick, numel, count, args.seed, static_cast<uint32_t>(range));
  }
};

__device__ inline uint32_t first_rank(double density, int64_t picks) {
  const double wanted = ceil(__dmul_rn(density, static_cast<double>(picks)));
  return static_cast<uint32_t>(min(max(wanted, 1.0), static_cast<double>(picks)));
}

}  // namespace dct::cuda
