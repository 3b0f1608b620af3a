// module.cpp -- the launchers behind plain C functions, for launchers.py to call by ctypes.
//
// Every argument is an int64_t or a double; addresses are int64_t. Returns are cudaError_t.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels.cuh"

namespace {

template <typename T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(address);
}

dct::DType dtype(int64_t code) { return static_cast<dct::DType>(code); }

dct::PayloadFormat format(int64_t code) { return static_cast<dct::PayloadFormat>(code); }

struct Scratch {
  void* data = nullptr;
  explicit Scratch(int64_t bytes) { cudaMalloc(&data, bytes); }
  ~Scratch() { cudaFree(data); }
};

int64_t times = 1;  // as large a tensor mask_pack is to cut up

}  // namespace

extern "C" {

void mask_pack_as_of(int64_t times_as_large) { times = times_as_large; }

int64_t sample_threshold(int64_t grad, int64_t grad_dtype, int64_t residual, int64_t numel,
                         int64_t ranges, double density, int64_t max_samples, int64_t seed,
                         int64_t inv_scale, int64_t threshold) {
  const dct::SampleThresholdArgs args = {at<void>(grad),
                                         dtype(grad_dtype),
                                         at<float>(residual),
                                         numel,
                                         ranges,
                                         density,
                                         max_samples,
                                         static_cast<uint32_t>(seed),
                                         at<float>(inv_scale),
                                         at<float>(threshold)};
  const Scratch scratch(dct::cuda::sample_threshold_scratch_bytes(args));
  return dct::cuda::sample_threshold(args, scratch.data, nullptr);
}

int64_t mask_pack(int64_t residual, int64_t grad, int64_t grad_dtype, int64_t numel, int64_t ranges,
                  int64_t threshold, int64_t seen, int64_t payload, int64_t capacity,
                  int64_t value_dtype, int64_t inv_scale) {
  const dct::MaskPackArgs args = {
      at<float>(residual),  at<void>(grad),    dtype(grad_dtype),    numel,    ranges,
      at<float>(threshold), at<int32_t>(seen), at<uint8_t>(payload), capacity, dtype(value_dtype),
      at<float>(inv_scale)};
  dct::MaskPackArgs large = args;
  large.numel *= times;
  large.capacity *= times;
  const dct::cuda::MaskPackSizes sizes = dct::cuda::mask_pack_sizes(large);
  const Scratch scratch(dct::cuda::mask_pack_scratch_bytes(args, sizes));
  return dct::cuda::mask_pack(args, sizes, scratch.data, nullptr);
}

int64_t scatter_unpack(int64_t payloads, int64_t ranks, int64_t ranges, int64_t capacity,
                       int64_t value_dtype, int64_t out, int64_t out_dtype, int64_t numel,
                       double scale, int64_t out_scale, int64_t status) {
  const dct::ScatterUnpackArgs args = {at<uint8_t>(payloads),
                                       ranks,
                                       ranges,
                                       capacity,
                                       dtype(value_dtype),
                                       at<void>(out),
                                       dtype(out_dtype),
                                       numel,
                                       static_cast<float>(scale),
                                       at<float>(out_scale),
                                       at<int32_t>(status)};
  return dct::cuda::scatter_unpack(args, nullptr);
}

int64_t quantize_pack(int64_t residual, int64_t grad, int64_t grad_dtype, int64_t numel,
                      int64_t payload, int64_t ranges, int64_t nbytes, int64_t code,
                      int64_t inv_scale) {
  const dct::QuantizePackArgs args = {at<float>(residual),
                                      at<void>(grad),
                                      dtype(grad_dtype),
                                      numel,
                                      at<uint8_t>(payload),
                                      ranges,
                                      nbytes,
                                      format(code),
                                      at<float>(inv_scale)};
  return dct::cuda::quantize_pack(args, nullptr);
}

int64_t dequantize_sum(int64_t payloads, int64_t ranks, int64_t ranges, int64_t nbytes,
                       int64_t code, int64_t out, int64_t out_dtype, int64_t numel, double scale,
                       int64_t out_scale, int64_t status) {
  const dct::DequantizeSumArgs args = {at<uint8_t>(payloads),
                                       ranks,
                                       ranges,
                                       nbytes,
                                       format(code),
                                       at<void>(out),
                                       dtype(out_dtype),
                                       numel,
                                       static_cast<float>(scale),
                                       at<float>(out_scale),
                                       at<int32_t>(status)};
  return dct::cuda::dequantize_sum(args, nullptr);
}

int64_t dequantize_sum_pack(int64_t payloads, int64_t ranks, int64_t nbytes_in, int64_t residual,
                            int64_t numel, int64_t payload, int64_t nbytes, int64_t code,
                            double scale, int64_t status) {
  const dct::DequantizeSumPackArgs args = {
      at<uint8_t>(payloads), ranks,  nbytes_in,    at<float>(residual),       numel,
      at<uint8_t>(payload),  nbytes, format(code), static_cast<float>(scale), at<int32_t>(status)};
  return dct::cuda::dequantize_sum_pack(args, nullptr);
}

int64_t row_pack(int64_t x, int64_t x_dtype, int64_t rows, int64_t width, int64_t k, int64_t values,
                 int64_t value_dtype, int64_t positions) {
  const dct::RowPackArgs args = {
      at<void>(x),        dtype(x_dtype),        rows, width, k, at<void>(values),
      dtype(value_dtype), at<uint8_t>(positions)};
  return dct::cuda::row_pack(args, nullptr);
}

int64_t row_gather(int64_t x, int64_t x_dtype, int64_t positions, int64_t rows, int64_t width,
                   int64_t k, int64_t values, int64_t value_dtype) {
  const dct::RowGatherArgs args = {
      at<void>(x), dtype(x_dtype),   at<uint8_t>(positions), rows, width,
      k,           at<void>(values), dtype(value_dtype)};
  return dct::cuda::row_gather(args, nullptr);
}

int64_t row_unpack(int64_t values, int64_t value_dtype, int64_t positions, int64_t rows,
                   int64_t width, int64_t k, int64_t out, int64_t out_dtype) {
  const dct::RowUnpackArgs args = {
      at<void>(values), dtype(value_dtype), at<uint8_t>(positions), rows, width, k,
      at<void>(out),    dtype(out_dtype)};
  return dct::cuda::row_unpack(args, nullptr);
}

int64_t row_quantize(int64_t x, int64_t x_dtype, int64_t rows, int64_t width, int64_t format,
                     int64_t out) {
  const dct::RowQuantizeArgs args = {
      at<void>(x),     dtype(x_dtype), rows, width, static_cast<dct::RowFormat>(format),
      at<uint8_t>(out)};
  return dct::cuda::row_quantize(args, nullptr);
}

int64_t row_dequantize(int64_t quantized, int64_t rows, int64_t width, int64_t format, int64_t out,
                       int64_t out_dtype) {
  const dct::RowDequantizeArgs args = {
      at<uint8_t>(quantized), rows, width, static_cast<dct::RowFormat>(format), at<void>(out),
      dtype(out_dtype)};
  return dct::cuda::row_dequantize(args, nullptr);
}
}
