// mask_pack behind a C function, for variants.py. Without scratch: how many bytes of it are needed.
#include "cuda/mask_pack.cuh"

extern "C" int64_t mask_pack(float* residual, const void* grad, int64_t grad_dtype, int64_t numel,
                             const int64_t* segments, const float* threshold, int32_t* seen,
                             int64_t num_segments, uint8_t* payload, int64_t capacity,
                             int64_t value_dtype, void* scratch, cudaStream_t stream) {
  dct::MaskPackArgs args = {};
  args.residual = residual;
  args.grad = grad;
  args.grad_dtype = static_cast<dct::DType>(grad_dtype);
  args.numel = numel;
  args.segments = segments;
  args.threshold = threshold;
  args.seen = seen;
  args.num_segments = num_segments;
  args.payload = payload;
  args.ranges = 1;
  args.capacity = capacity;
  args.value_dtype = static_cast<dct::DType>(value_dtype);
  if (scratch == nullptr) return dct::cuda::mask_pack_scratch_bytes(args);
  return dct::cuda::mask_pack(args, scratch, stream);
}
