// sample_threshold behind a C function, for variants.py. Without scratch: how many bytes of it are
// needed.
#include "cuda/sample_threshold.cuh"

extern "C" int64_t sample_threshold(const void* x, int64_t x_dtype, int64_t numel,
                                    const float* residual, const int64_t* segments,
                                    int64_t num_segments, double density, int64_t max_samples,
                                    int64_t seed, float* threshold, void* scratch,
                                    cudaStream_t stream) {
  dct::SampleThresholdArgs args = {};
  args.x = x;
  args.x_dtype = static_cast<dct::DType>(x_dtype);
  args.residual = residual;
  args.segments = segments;
  args.num_segments = num_segments;
  args.density = density;
  args.max_samples = max_samples;
  args.seed = static_cast<uint32_t>(seed);
  args.threshold = threshold;
  if (scratch == nullptr) return dct::cuda::sample_threshold_scratch_bytes(args);
  return dct::cuda::sample_threshold(args, numel, scratch, stream);
}
