// The ops for CUDA tensors: check, allocate what the op returns and its scratch from torch's
// caching allocator, launch on the current stream of the tensors' device. Never synchronizes.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "../common/rows.h"
#include "../cuda/kernels.cuh"
#include "contract.h"

namespace dct {
namespace {

using torch::stable::new_empty;

// Device guard for a tensor's device, with that device's current stream.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& tensor)
      : guard_(tensor.get_device_index()), device_(tensor.get_device_index()) {}

  cudaStream_t stream() const {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    return static_cast<cudaStream_t>(stream);
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  int32_t device_;
};

void require_success(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // cleared, or the next check of another library would report it
  throw std::runtime_error("dct::" + std::string(op) +
                           ": CUDA error: " + cudaGetErrorString(error));
}

Tensor scratch_like(const Tensor& tensor, int64_t nbytes) {
  return new_empty(tensor, {nbytes}, ScalarType::Byte);
}

Tensor sample_threshold(const Tensor& grad, const Tensor& residual, double density, int64_t ranges,
                        int64_t max_samples, int64_t seed, const OptionalTensor& inv_scale) {
  SampleThresholdArgs args =
      sample_threshold_args(grad, residual, density, ranges, max_samples, seed, inv_scale);
  const OnDeviceOf device(grad);
  Tensor threshold = new_empty(grad, {ranges}, ScalarType::Float);
  args.threshold = threshold.mutable_data_ptr<float>();
  const Tensor scratch = scratch_like(grad, cuda::sample_threshold_scratch_bytes(args));
  require_success("sample_threshold",
                  cuda::sample_threshold(args, scratch.mutable_data_ptr(), device.stream()));
  return threshold;
}

void mask_pack(const Tensor& residual, const Tensor& grad, const Tensor& threshold,
               const Tensor& payload, const Tensor& seen, int64_t capacity, ScalarType value_dtype,
               const OptionalTensor& inv_scale) {
  const MaskPackArgs args =
      mask_pack_args(residual, grad, threshold, payload, seen, capacity, value_dtype, inv_scale);
  const OnDeviceOf device(residual);
  const cuda::MaskPackSizes sizes = cuda::mask_pack_sizes(args);
  const Tensor scratch = scratch_like(residual, cuda::mask_pack_scratch_bytes(args, sizes));
  require_success("mask_pack",
                  cuda::mask_pack(args, sizes, scratch.mutable_data_ptr(), device.stream()));
}

Tensor scatter_unpack(const Tensor& payloads, const Tensor& out, int64_t capacity,
                      ScalarType value_dtype, double scale, const OptionalTensor& out_scale) {
  ScatterUnpackArgs args =
      scatter_unpack_args(payloads, out, capacity, value_dtype, scale, out_scale);
  const OnDeviceOf device(out);
  Tensor status = new_empty(payloads, {args.ranks}, ScalarType::Int);
  args.status = status.mutable_data_ptr<int32_t>();
  require_success("scatter_unpack", cuda::scatter_unpack(args, device.stream()));
  return status;
}

void quantize_pack(const OptionalTensor& residual, const Tensor& grad, const Tensor& payload,
                   const std::string& format, const OptionalTensor& inv_scale) {
  const QuantizePackArgs args = quantize_pack_args(residual, grad, payload, format, inv_scale);
  const OnDeviceOf device(payload);
  require_success("quantize_pack", cuda::quantize_pack(args, device.stream()));
}

Tensor dequantize_sum(const Tensor& payloads, const Tensor& out, const std::string& format,
                      double scale, const OptionalTensor& out_scale) {
  DequantizeSumArgs args = dequantize_sum_args(payloads, out, format, scale, out_scale);
  const OnDeviceOf device(out);
  Tensor status = new_empty(payloads, {args.ranks}, ScalarType::Int);
  args.status = status.mutable_data_ptr<int32_t>();
  require_success("dequantize_sum", cuda::dequantize_sum(args, device.stream()));
  return status;
}

Tensor dequantize_sum_pack(const Tensor& payloads, const Tensor& residual, const Tensor& payload,
                           const std::string& format, double scale) {
  DequantizeSumPackArgs args = dequantize_sum_pack_args(payloads, residual, payload, format, scale);
  const OnDeviceOf device(residual);
  Tensor status = new_empty(payloads, {args.ranks}, ScalarType::Int);
  args.status = status.mutable_data_ptr<int32_t>();
  require_success("dequantize_sum_pack", cuda::dequantize_sum_pack(args, device.stream()));
  return status;
}

std::tuple<Tensor, Tensor> row_pack(const Tensor& x, int64_t k, ScalarType value_dtype) {
  RowPackArgs args = row_pack_args(x, k, value_dtype);
  const OnDeviceOf device(x);
  Tensor values = new_empty(x, {args.rows, k}, value_dtype);
  Tensor positions = new_empty(x, {args.rows, position_bytes(args.width, k)}, ScalarType::Byte);
  args.values = values.mutable_data_ptr();
  args.positions = positions.mutable_data_ptr<uint8_t>();
  require_success("row_pack", cuda::row_pack(args, device.stream()));
  return {values, positions};
}

Tensor row_gather(const Tensor& x, const Tensor& positions, int64_t k, ScalarType value_dtype) {
  RowGatherArgs args = row_gather_args(x, positions, k, value_dtype);
  const OnDeviceOf device(x);
  Tensor values = new_empty(x, {args.rows, k}, value_dtype);
  args.values = values.mutable_data_ptr();
  require_success("row_gather", cuda::row_gather(args, device.stream()));
  return values;
}

Tensor row_unpack(const Tensor& values, const Tensor& positions, int64_t width, ScalarType dtype) {
  RowUnpackArgs args = row_unpack_args(values, positions, width, dtype);
  const OnDeviceOf device(values);
  Tensor out = new_empty(values, {args.rows, width}, dtype);
  args.out = out.mutable_data_ptr();
  require_success("row_unpack", cuda::row_unpack(args, device.stream()));
  return out;
}

Tensor row_quantize(const Tensor& x, const std::string& format) {
  RowQuantizeArgs args = row_quantize_args(x, format);
  const OnDeviceOf device(x);
  Tensor rows = new_empty(x, {args.rows, row_bytes(args.width, args.format)}, ScalarType::Byte);
  args.out = rows.mutable_data_ptr<uint8_t>();
  require_success("row_quantize", cuda::row_quantize(args, device.stream()));
  return rows;
}

Tensor row_dequantize(const Tensor& rows, int64_t width, const std::string& format,
                      ScalarType dtype) {
  RowDequantizeArgs args = row_dequantize_args(rows, width, format, dtype);
  const OnDeviceOf device(rows);
  Tensor out = new_empty(rows, {args.rows, width}, dtype);
  args.out = out.mutable_data_ptr();
  require_success("row_dequantize", cuda::row_dequantize(args, device.stream()));
  return out;
}

}  // namespace
}  // namespace dct

STABLE_TORCH_LIBRARY_IMPL(dct, CUDA, m) {
  m.impl("sample_threshold", TORCH_BOX(&dct::sample_threshold));
  m.impl("mask_pack", TORCH_BOX(&dct::mask_pack));
  m.impl("scatter_unpack", TORCH_BOX(&dct::scatter_unpack));
  m.impl("quantize_pack", TORCH_BOX(&dct::quantize_pack));
  m.impl("dequantize_sum", TORCH_BOX(&dct::dequantize_sum));
  m.impl("dequantize_sum_pack", TORCH_BOX(&dct::dequantize_sum_pack));
  m.impl("row_pack", TORCH_BOX(&dct::row_pack));
  m.impl("row_gather", TORCH_BOX(&dct::row_gather));
  m.impl("row_unpack", TORCH_BOX(&dct::row_unpack));
  m.impl("row_quantize", TORCH_BOX(&dct::row_quantize));
  m.impl("row_dequantize", TORCH_BOX(&dct::row_dequantize));
}
