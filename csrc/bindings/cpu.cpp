// The ops for CPU tensors: check, allocate what the op returns, call the kernel on torch's threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <tuple>

#include "../common/rows.h"
#include "../cpu/kernels.h"
#include "contract.h"

namespace dct {
namespace {

using cpu::FunctionRef;
using cpu::Parallel;
using torch::stable::new_empty;

// torch's thread pool, and as many tasks as torch.set_num_threads allows.
Parallel torch_parallel() {
  static constexpr auto run = [](int64_t tasks, FunctionRef<void(int64_t)> body) {
    torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) body(task);
    });
  };
  return {torch::stable::get_num_threads(), run};
}

Tensor sample_threshold(const Tensor& grad, const Tensor& residual, double density, int64_t ranges,
                        int64_t max_samples, int64_t seed, const OptionalTensor& inv_scale) {
  SampleThresholdArgs args =
      sample_threshold_args(grad, residual, density, ranges, max_samples, seed, inv_scale);
  Tensor threshold = new_empty(grad, {ranges}, ScalarType::Float);
  args.threshold = threshold.mutable_data_ptr<float>();
  cpu::sample_threshold(args, torch_parallel());
  return threshold;
}

void mask_pack(const Tensor& residual, const Tensor& grad, const Tensor& threshold,
               const Tensor& payload, const Tensor& seen, int64_t capacity, ScalarType value_dtype,
               const OptionalTensor& inv_scale) {
  const MaskPackArgs args =
      mask_pack_args(residual, grad, threshold, payload, seen, capacity, value_dtype, inv_scale);
  cpu::mask_pack(args, torch_parallel());
}

Tensor scatter_unpack(const Tensor& payloads, const Tensor& out, int64_t capacity,
                      ScalarType value_dtype, double scale, const OptionalTensor& out_scale) {
  ScatterUnpackArgs args =
      scatter_unpack_args(payloads, out, capacity, value_dtype, scale, out_scale);
  Tensor status = new_empty(payloads, {args.ranks}, ScalarType::Int);
  args.status = status.mutable_data_ptr<int32_t>();
  cpu::scatter_unpack(args, torch_parallel());
  return status;
}

void quantize_pack(const OptionalTensor& residual, const Tensor& grad, const Tensor& payload,
                   const std::string& format, const OptionalTensor& inv_scale) {
  const QuantizePackArgs args = quantize_pack_args(residual, grad, payload, format, inv_scale);
  cpu::quantize_pack(args, torch_parallel());
}

Tensor dequantize_sum(const Tensor& payloads, const Tensor& out, const std::string& format,
                      double scale, const OptionalTensor& out_scale) {
  DequantizeSumArgs args = dequantize_sum_args(payloads, out, format, scale, out_scale);
  Tensor status = new_empty(payloads, {args.ranks}, ScalarType::Int);
  args.status = status.mutable_data_ptr<int32_t>();
  cpu::dequantize_sum(args, torch_parallel());
  return status;
}

Tensor dequantize_sum_pack(const Tensor& payloads, const Tensor& residual, const Tensor& payload,
                           const std::string& format, double scale) {
  DequantizeSumPackArgs args = dequantize_sum_pack_args(payloads, residual, payload, format, scale);
  Tensor status = new_empty(payloads, {args.ranks}, ScalarType::Int);
  args.status = status.mutable_data_ptr<int32_t>();
  cpu::dequantize_sum_pack(args, torch_parallel());
  return status;
}

std::tuple<Tensor, Tensor> row_pack(const Tensor& x, int64_t k, ScalarType value_dtype) {
  RowPackArgs args = row_pack_args(x, k, value_dtype);
  Tensor values = new_empty(x, {args.rows, k}, value_dtype);
  Tensor positions = new_empty(x, {args.rows, position_bytes(args.width, k)}, ScalarType::Byte);
  args.values = values.mutable_data_ptr();
  args.positions = positions.mutable_data_ptr<uint8_t>();
  cpu::row_pack(args, torch_parallel());
  return {values, positions};
}

Tensor row_gather(const Tensor& x, const Tensor& positions, int64_t k, ScalarType value_dtype) {
  RowGatherArgs args = row_gather_args(x, positions, k, value_dtype);
  Tensor values = new_empty(x, {args.rows, k}, value_dtype);
  args.values = values.mutable_data_ptr();
  cpu::row_gather(args, torch_parallel());
  return values;
}

Tensor row_unpack(const Tensor& values, const Tensor& positions, int64_t width, ScalarType dtype) {
  RowUnpackArgs args = row_unpack_args(values, positions, width, dtype);
  Tensor out = new_empty(values, {args.rows, width}, dtype);
  args.out = out.mutable_data_ptr();
  cpu::row_unpack(args, torch_parallel());
  return out;
}

Tensor row_quantize(const Tensor& x, const std::string& format) {
  RowQuantizeArgs args = row_quantize_args(x, format);
  Tensor rows = new_empty(x, {args.rows, row_bytes(args.width, args.format)}, ScalarType::Byte);
  args.out = rows.mutable_data_ptr<uint8_t>();
  cpu::row_quantize(args, torch_parallel());
  return rows;
}

Tensor row_dequantize(const Tensor& rows, int64_t width, const std::string& format,
                      ScalarType dtype) {
  RowDequantizeArgs args = row_dequantize_args(rows, width, format, dtype);
  Tensor out = new_empty(rows, {args.rows, width}, dtype);
  args.out = out.mutable_data_ptr();
  cpu::row_dequantize(args, torch_parallel());
  return out;
}

}  // namespace
}  // namespace dct

STABLE_TORCH_LIBRARY_IMPL(dct, CPU, m) {
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
