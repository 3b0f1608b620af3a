// track_threshold.cu -- a feedback step per segment, in float32, each operation rounded.
#include "detail/launch.cuh"
#include "detail/platform.cuh"
#include "track_threshold.cuh"

namespace dct::cuda {
namespace {

constexpr int kThreads = 256;

// NaN if either is, unlike fminf and fmaxf.
__device__ float minimum(float a, float b) { return a != a || a < b ? a : b; }
__device__ float maximum(float a, float b) { return a != a || a > b ? a : b; }

__global__ void __launch_bounds__(kThreads) track_threshold_kernel(TrackThresholdArgs args) {
  const int64_t s = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (s >= args.num_segments) return;
  const float threshold = args.threshold[s], target = args.target[s];
  if (threshold < 0.0f) return;  // a skipped segment stays so
  const float excess = __fsub_rn(static_cast<float>(args.seen[s]), target);
  const float relative = __fdiv_rn(__fmul_rn(0.05f, excess), maximum(target, 1.0f));
  const float step = minimum(maximum(relative, -0.05f), 0.25f);
  const float moved = __fmul_rn(threshold, __fadd_rn(1.0f, step));
  const float lowest = __fmul_rn(0.25f, args.reference[s]);
  const float highest = __fmul_rn(64.0f, args.reference[s]);
  args.threshold[s] = minimum(maximum(moved, lowest), highest);
}

}  // namespace

cudaError_t track_threshold(const TrackThresholdArgs& args, cudaStream_t stream) {
  if (args.num_segments == 0) return cudaSuccess;
  const int64_t blocks = (args.num_segments + kThreads - 1) / kThreads;
  if (blocks > kMaxGrid) return cudaErrorInvalidValue;
  return launch(track_threshold_kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream,
                args);
}

}  // namespace dct::cuda
