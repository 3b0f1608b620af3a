#pragma once

// The picks of sample_threshold: which elements they are, and the rank that is selected among them.

#include "../../common/hash.h"
#include "../../common/ops.h"
#include "elements.cuh"

namespace dct::cuda {

constexpr int kSampleMinBlocks = 4;  // of kernels with a thread per pick, or several

// The arguments, with the length of a full range: a division that no thread repeats.
struct SampleArgs : SampleThresholdArgs {
  int64_t range_length;
  explicit SampleArgs(const SampleThresholdArgs& args)
      : SampleThresholdArgs(args), range_length(range_blocks(numel, ranges) * kBlock) {}
};

struct Picks {
  int64_t range, begin, numel, count;  // of the range, and how many picks it has

  __device__ Picks(const SampleArgs& args, int64_t range)
      : range(range), begin(min(range * args.range_length, args.numel)) {
    numel = min(args.range_length, args.numel - begin);
    count = min(numel, args.max_samples);
  }

  // The element that a pick is.
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
