// sample_threshold.cu -- radix select over the picks of every range. It finds three digits of the
// 31-bit magnitude, most significant first. Few picks are selected in registers
// (detail/sample_few.cuh). Many picks take one kernel per digit (detail/sample_many.cuh).
#include <algorithm>

#include "detail/sample_few.cuh"
#include "detail/sample_many.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

bool are_few(const SampleThresholdArgs& args) {
  return args.max_samples <= FewPicks::kMost &&
         args.ranges <= FewPicks::kMostKeys / args.max_samples;
}

bool are_direct(const SampleThresholdArgs& args) {
  return args.max_samples <= FewPicks::kMostDirect;
}

template <typename T>
cudaError_t run_few(const SampleArgs& args, uint32_t* keys, cudaStream_t stream) {
  if (are_direct(args)) {
    return launch(select_pick_kernel<T>, args.ranges, FewPicks::kThreads, 0, stream, args);
  }
  const int64_t picks = std::min(args.max_samples, args.range_length);
  const int64_t per_range = std::max<int64_t>(ceil_div(picks, kThreads), 1);
  const cudaError_t gathered = launch(gather_keys_kernel<T>, args.ranges * per_range, kThreads, 0,
                                      stream, args, static_cast<int>(per_range), keys);
  if (gathered != cudaSuccess) return gathered;
  return launch(select_key_kernel, args.ranges, FewPicks::kThreads, 0, stream, args, keys);
}

template <typename T>
cudaError_t run_many(const SampleArgs& args, RangeState* states, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(states, 0, sizeof(RangeState) * args.ranges, stream);
  if (cleared != cudaSuccess) return cleared;
  const int64_t picks = std::min(args.max_samples, args.range_length);
  const int64_t most =
      std::max<int64_t>(ManyPicks::kMaxBlocks / args.ranges, ManyPicks::kMinPerRange);
  const int64_t per_range =
      std::max<int64_t>(std::min(ceil_div(picks, ManyPicks::kPicks), most), 1);
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
    return are_few(args) ? run_few<T>(SampleArgs(args), static_cast<uint32_t*>(scratch), stream)
                         : run_many<T>(SampleArgs(args), static_cast<RangeState*>(scratch), stream);
  });
}

}  // namespace dct::cuda
