// scatter_unpack behind a C function, for variants.py.
#include "cuda/scatter_unpack.cuh"

extern "C" int64_t scatter_unpack(const uint8_t* payloads, int64_t ranks, int64_t capacity,
                                  int64_t value_dtype, void* out, int64_t out_dtype, int64_t numel,
                                  double scale, int32_t* status, cudaStream_t stream) {
  dct::ScatterUnpackArgs args = {};
  args.payloads = payloads;
  args.ranks = ranks;
  args.ranges = 1;
  args.capacity = capacity;
  args.value_dtype = static_cast<dct::DType>(value_dtype);
  args.out = out;
  args.out_dtype = static_cast<dct::DType>(out_dtype);
  args.numel = numel;
  args.scale = static_cast<float>(scale);
  args.status = status;
  return dct::cuda::scatter_unpack(args, stream);
}
