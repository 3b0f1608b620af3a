// Each op checks that the call is safe, allocates the results and runs the kernel. This file is
// compiled for CPU tensors and, with USE_CUDA, for CUDA tensors. An error names the argument and
// its value. dct_kernels/checks.py has the full error messages.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <tuple>
#include <vector>

#ifdef USE_CUDA
#include "backend_cuda.h"
#else
#include "backend_cpu.h"
#endif
#include "checks.h"

namespace dct {
namespace {

using torch::stable::new_empty;

// Checks and fills the arguments that scatter_unpack and dequantize_sum share.
template <typename Args>
Args sum_args(const Checks& checks, const Tensor& payloads, const Tensor& out, Interval dims,
              double scale, const OptionalTensor& out_scale) {
  Args args{};
  args.out_dtype = checks.require_tensor("out", out, kFloats, dims);
  checks.require_tensor("payloads", payloads, {ScalarType::Byte}, {2, 3});
  args.out_scale = checks.require_scale("out_scale", out_scale);
  checks.require_apart({{"out", out}, {"payloads", payloads}, {"out_scale", out_scale}}, 1);
  args.payloads = payloads.const_data_ptr<uint8_t>();
  args.ranks = payloads.size(0);
  args.out = out.mutable_data_ptr();
  args.numel = out.numel();
  args.scale = static_cast<float>(scale);
  return args;
}

// Checks and fills the arguments that row_pack and row_gather share. Both return k entries per row.
template <typename Args>
Args top_k_args(const Checks& checks, const Tensor& x, int64_t k, ScalarType value_dtype) {
  Args args{};
  args.x_dtype = checks.require_tensor("x", x, kFloats, 2);
  args.value_dtype = checks.require_dtype("value_dtype", value_dtype, kFloats);
  args.x = x.const_data_ptr();
  args.rows = x.size(0);
  args.width = x.size(1);
  args.k = k;
  checks.require_in("k", "", k, {1, args.width});
  return args;
}

// The arguments that row_dequantize and row_dequantize_sum have in common.
template <typename Args>
Args dequantize_args(const Checks& checks, const Tensor& rows, int64_t dims, int64_t width,
                     const std::string& format, ScalarType dtype) {
  Args args{};
  checks.require_tensor("rows", rows, {ScalarType::Byte}, dims);
  checks.require_in("width", "", width, {1, kInt32Max});
  args.format = checks.require_format(format);
  args.out_dtype = checks.require_dtype("dtype", dtype, kFloats);
  const int64_t bytes = row_bytes(width, args.format);
  checks.require_in("rows", ".size(-1)", rows.size(dims - 1), bytes);
  args.quantized = rows.const_data_ptr<uint8_t>();
  args.rows = rows.size(dims - 2);
  args.width = width;
  return args;
}

Tensor sample_threshold(const Tensor& grad, const Tensor& residual, double density, int64_t ranges,
                        int64_t max_samples, int64_t seed, const OptionalTensor& inv_scale) {
  const Checks checks("sample_threshold", grad);
  SampleThresholdArgs args{};
  args.grad_dtype = checks.require_tensor("grad", grad, kFloats, 1);
  checks.require_tensor("residual", residual, {ScalarType::Float}, 1, grad.numel());
  if (!(density > 0 && density <= 1)) {
    checks.fail("density", "be in (0, 1]", std::to_string(density));
  }
  checks.require_in("ranges", "", ranges, {1, kInt32Max});
  checks.require_in("max_samples", "", max_samples, {1, kInt32Max});
  args.inv_scale = checks.require_scale("inv_scale", inv_scale);
  args.grad = grad.const_data_ptr();
  args.residual = residual.const_data_ptr<float>();
  args.numel = grad.numel();
  args.ranges = ranges;
  args.density = density;
  args.max_samples = max_samples;
  args.seed = static_cast<uint32_t>(seed);
  Tensor threshold = new_empty(grad, {ranges}, ScalarType::Float);
  args.threshold = threshold.mutable_data_ptr<float>();
  backend::run(checks, backend::sample_threshold, args);
  return threshold;
}

void mask_pack(const Tensor& residual, const Tensor& grad, const Tensor& threshold,
               const Tensor& payload, const Tensor& seen, int64_t capacity, ScalarType value_dtype,
               const OptionalTensor& inv_scale) {
  const Checks checks("mask_pack", residual);
  MaskPackArgs args{};
  checks.require_tensor("residual", residual, {ScalarType::Float}, 1);
  args.numel = residual.numel();
  args.grad_dtype = checks.require_tensor("grad", grad, kFloats, 1, args.numel);
  checks.require_tensor("payload", payload, {ScalarType::Byte}, {1, 2});
  checks.require_in("capacity", "", capacity, {1, kUint32Max});
  args.value_dtype = checks.require_dtype("value_dtype", value_dtype, kPayloadValues);
  args.ranges =
      checks.require_payload("payload", payload, 2, args.numel, capacity, args.value_dtype);
  checks.require_tensor("threshold", threshold, {ScalarType::Float}, 1, args.ranges);
  checks.require_tensor("seen", seen, {ScalarType::Int}, 1, args.ranges);
  args.inv_scale = checks.require_scale("inv_scale", inv_scale);
  checks.require_apart({{"residual", residual},
                        {"payload", payload},
                        {"seen", seen},
                        {"grad", grad},
                        {"threshold", threshold},
                        {"inv_scale", inv_scale}},
                       3);
  args.residual = residual.mutable_data_ptr<float>();
  args.grad = grad.const_data_ptr();
  args.threshold = threshold.const_data_ptr<float>();
  args.seen = seen.mutable_data_ptr<int32_t>();
  args.payload = payload.mutable_data_ptr<uint8_t>();
  args.capacity = capacity;
  backend::run(checks, backend::mask_pack, args);
}

Tensor scatter_unpack(const Tensor& payloads, const Tensor& out, int64_t capacity,
                      ScalarType value_dtype, double scale, const OptionalTensor& out_scale) {
  const Checks checks("scatter_unpack", out);
  auto args = sum_args<ScatterUnpackArgs>(checks, payloads, out, 1, scale, out_scale);
  checks.require_in("capacity", "", capacity, {1, kUint32Max});
  args.value_dtype = checks.require_dtype("value_dtype", value_dtype, kPayloadValues);
  args.ranges =
      checks.require_payload("payloads", payloads, 3, args.numel, capacity, args.value_dtype);
  args.capacity = capacity;
  Tensor status = new_empty(payloads, {args.ranks}, ScalarType::Int);
  args.status = status.mutable_data_ptr<int32_t>();
  backend::run(checks, backend::scatter_unpack, args);
  return status;
}

void quantize_pack(const OptionalTensor& residual, const Tensor& grad, const Tensor& payload,
                   const std::string& format, const OptionalTensor& inv_scale) {
  const Checks checks("quantize_pack", payload);
  QuantizePackArgs args{};
  checks.require_tensor("payload", payload, {ScalarType::Byte}, {1, 2});
  args.numel = grad.numel();
  Interval dims = {1, 2};
  if (residual.has_value()) {
    checks.require_tensor("residual", *residual, {ScalarType::Float}, dims);
    args.residual = residual->mutable_data_ptr<float>();
    args.numel = residual->numel();
    dims = residual->dim();
  }
  args.grad_dtype = checks.require_tensor("grad", grad, kFloats, dims, args.numel);
  if (residual.has_value()) checks.require_in("grad", ".size(0)", grad.size(0), residual->size(0));
  args.grad = grad.const_data_ptr();
  args.format = checks.require_payload_format(format);
  args.inv_scale = checks.require_scale("inv_scale", inv_scale);
  checks.require_quantized("payload", payload, 2, grad, args);
  checks.require_apart(
      {{"residual", residual}, {"payload", payload}, {"grad", grad}, {"inv_scale", inv_scale}}, 2);
  args.payload = payload.mutable_data_ptr<uint8_t>();
  backend::run(checks, backend::quantize_pack, args);
}

Tensor dequantize_sum(const Tensor& payloads, const Tensor& out, const std::string& format,
                      double scale, const OptionalTensor& out_scale) {
  const Checks checks("dequantize_sum", out);
  auto args = sum_args<DequantizeSumArgs>(checks, payloads, out, {1, 2}, scale, out_scale);
  args.format = checks.require_payload_format(format);
  checks.require_quantized("payloads", payloads, 3, out, args);
  std::vector<int64_t> shape = {args.ranks};
  if (out.dim() == 2) shape.push_back(args.ranges);
  Tensor status = new_empty(payloads, shape, ScalarType::Int);
  args.status = status.mutable_data_ptr<int32_t>();
  args.statuses = out.dim() == 2 ? args.ranges : 1;
  backend::run(checks, backend::dequantize_sum, args);
  return status;
}

std::tuple<Tensor, Tensor> row_pack(const Tensor& x, int64_t k, ScalarType value_dtype) {
  const Checks checks("row_pack", x);
  auto args = top_k_args<RowPackArgs>(checks, x, k, value_dtype);
  Tensor values = new_empty(x, {args.rows, k}, value_dtype);
  Tensor positions = new_empty(x, {args.rows, position_bytes(args.width, k)}, ScalarType::Byte);
  args.values = values.mutable_data_ptr();
  args.positions = positions.mutable_data_ptr<uint8_t>();
  backend::run(checks, backend::row_pack, args);
  return {values, positions};
}

Tensor row_gather(const Tensor& x, const Tensor& positions, int64_t k, ScalarType value_dtype) {
  const Checks checks("row_gather", x);
  auto args = top_k_args<RowGatherArgs>(checks, x, k, value_dtype);
  args.positions = checks.require_positions(positions, args.rows, args.width, k);
  Tensor values = new_empty(x, {args.rows, k}, value_dtype);
  args.values = values.mutable_data_ptr();
  backend::run(checks, backend::row_gather, args);
  return values;
}

Tensor row_unpack(const Tensor& values, const Tensor& positions, int64_t width, ScalarType dtype) {
  const Checks checks("row_unpack", values);
  RowUnpackArgs args{};
  args.value_dtype = checks.require_tensor("values", values, kFloats, 2);
  args.out_dtype = checks.require_dtype("dtype", dtype, kFloats);
  args.values = values.const_data_ptr();
  args.rows = values.size(0);
  args.width = width;
  args.k = values.size(1);
  checks.require_in("width", "", width, {1, kInt32Max});
  checks.require_in("values", ".size(1)", args.k, {1, width});
  args.positions = checks.require_positions(positions, args.rows, width, args.k);
  Tensor out = new_empty(values, {args.rows, width}, dtype);
  args.out = out.mutable_data_ptr();
  backend::run(checks, backend::row_unpack, args);
  return out;
}

Tensor row_quantize(const Tensor& x, const std::string& format) {
  const Checks checks("row_quantize", x);
  RowQuantizeArgs args{};
  args.x_dtype = checks.require_tensor("x", x, kFloats, 2);
  args.x = x.const_data_ptr();
  args.rows = x.size(0);
  args.width = x.size(1);
  args.format = checks.require_format(format);
  checks.require_in("x", ".size(1)", args.width, {1, kInt32Max});
  Tensor rows = new_empty(x, {args.rows, row_bytes(args.width, args.format)}, ScalarType::Byte);
  args.out = rows.mutable_data_ptr<uint8_t>();
  backend::run(checks, backend::row_quantize, args);
  return rows;
}

Tensor row_dequantize(const Tensor& rows, int64_t width, const std::string& format,
                      ScalarType dtype) {
  const Checks checks("row_dequantize", rows);
  auto args = dequantize_args<RowDequantizeArgs>(checks, rows, 2, width, format, dtype);
  Tensor out = new_empty(rows, {args.rows, width}, dtype);
  args.out = out.mutable_data_ptr();
  backend::run(checks, backend::row_dequantize, args);
  return out;
}

Tensor row_dequantize_sum(const Tensor& rows, int64_t width, const std::string& format,
                          ScalarType dtype) {
  const Checks checks("row_dequantize_sum", rows);
  auto args = dequantize_args<RowDequantizeSumArgs>(checks, rows, 3, width, format, dtype);
  args.ranks = rows.size(0);
  checks.require_in("rows", ".size(0)", args.ranks, {1, kInt32Max});
  Tensor out = new_empty(rows, {args.rows, width}, dtype);
  args.out = out.mutable_data_ptr();
  backend::run(checks, backend::row_dequantize_sum, args);
  return out;
}

void diff_pack(const Tensor& weights, const Tensor& snapshot, const Tensor& patch,
               const OptionalTensor& checksums, int64_t capacity) {
  const Checks checks("diff_pack", snapshot);
  DiffPackArgs args{};
  args.dtype = checks.require_tensor("snapshot", snapshot, kHalves, 1);
  args.numel = snapshot.numel();
  args.weights_dtype = checks.require_tensor(
      "weights", weights, {ScalarType::Float, snapshot.scalar_type()}, 1, args.numel);
  checks.require_tensor("patch", patch, {ScalarType::Byte}, 1);
  checks.require_in("capacity", "", capacity, {1, kUint32Max});
  checks.require_in("patch", ".numel()", patch.numel(), patch_bytes(args.numel, capacity));
  checks.require_aligned("patch", patch);
  if (checksums.has_value()) {
    checks.require_tensor("checksums", *checksums, {ScalarType::Long}, 1, 2);
    args.checksums = checksums->mutable_data_ptr<int64_t>();
  }
  checks.require_apart(
      {{"patch", patch}, {"checksums", checksums}, {"weights", weights}, {"snapshot", snapshot}},
      2);
  args.weights = weights.const_data_ptr();
  args.snapshot = static_cast<const uint16_t*>(snapshot.const_data_ptr());
  args.patch = patch.mutable_data_ptr<uint8_t>();
  args.capacity = capacity;
  backend::run(checks, backend::diff_pack, args);
}

// Checks and fills the arguments that patch_check and patch_apply share, and returns the status.
Tensor patch_status(const Checks& checks, const Tensor& patch, PatchApplyArgs& args) {
  checks.require_tensor("patch", patch, {ScalarType::Byte}, 1);
  checks.require_aligned("patch", patch);
  Tensor status = new_empty(patch, {1}, ScalarType::Int);
  args.patch = patch.const_data_ptr<uint8_t>();
  args.nbytes = patch.numel();
  args.status = status.mutable_data_ptr<int32_t>();
  return status;
}

Tensor patch_check(const Tensor& patch, int64_t numel, ScalarType dtype) {
  const Checks checks("patch_check", patch);
  PatchApplyArgs args{};
  const Tensor status = patch_status(checks, patch, args);
  checks.require_in("numel", "", numel, kAny);
  args.numel = numel;
  args.dtype = checks.require_dtype("dtype", dtype, kHalves);
  backend::run(checks, backend::patch_apply, args);
  return status;
}

Tensor patch_apply(const Tensor& patch, const Tensor& weights) {
  const Checks checks("patch_apply", weights);
  PatchApplyArgs args{};
  args.dtype = checks.require_tensor("weights", weights, kHalves, 1);
  const Tensor status = patch_status(checks, patch, args);
  checks.require_apart({{"weights", weights}, {"patch", patch}}, 1);
  args.numel = weights.numel();
  args.weights = static_cast<uint16_t*>(weights.mutable_data_ptr());
  backend::run(checks, backend::patch_apply, args);
  return status;
}

Tensor checksum(const Tensor& weights) {
  const Checks checks("checksum", weights);
  ChecksumArgs args{};
  checks.require_tensor("weights", weights, kHalves, 1);
  args.weights = static_cast<const uint16_t*>(weights.const_data_ptr());
  args.numel = weights.numel();
  Tensor sum = new_empty(weights, {1}, ScalarType::Long);
  args.checksum = sum.mutable_data_ptr<int64_t>();
  backend::run(checks, backend::checksum, args);
  return sum;
}

}  // namespace
}  // namespace dct

STABLE_TORCH_LIBRARY_IMPL(dct, DCT_DISPATCH_KEY, m) {
  m.impl("sample_threshold", TORCH_BOX(&dct::sample_threshold));
  m.impl("mask_pack", TORCH_BOX(&dct::mask_pack));
  m.impl("scatter_unpack", TORCH_BOX(&dct::scatter_unpack));
  m.impl("quantize_pack", TORCH_BOX(&dct::quantize_pack));
  m.impl("dequantize_sum", TORCH_BOX(&dct::dequantize_sum));
  m.impl("row_pack", TORCH_BOX(&dct::row_pack));
  m.impl("row_gather", TORCH_BOX(&dct::row_gather));
  m.impl("row_unpack", TORCH_BOX(&dct::row_unpack));
  m.impl("row_quantize", TORCH_BOX(&dct::row_quantize));
  m.impl("row_dequantize", TORCH_BOX(&dct::row_dequantize));
  m.impl("row_dequantize_sum", TORCH_BOX(&dct::row_dequantize_sum));
  m.impl("diff_pack", TORCH_BOX(&dct::diff_pack));
  m.impl("patch_check", TORCH_BOX(&dct::patch_check));
  m.impl("patch_apply", TORCH_BOX(&dct::patch_apply));
  m.impl("checksum", TORCH_BOX(&dct::checksum));
}
