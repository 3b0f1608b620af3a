#include "contract.h"

#include "checks.h"

namespace dct {
namespace {

// What row_pack and row_gather have in common: k entries of each row.
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

}  // namespace

SampleThresholdArgs sample_threshold_args(const Tensor& grad, const Tensor& residual,
                                          double density, int64_t ranges, int64_t max_samples,
                                          int64_t seed, const OptionalTensor& inv_scale) {
  const Checks checks("sample_threshold", grad);
  SampleThresholdArgs args{};
  args.grad_dtype = checks.require_tensor("grad", grad, kFloats, 1);
  checks.require_tensor("residual", residual, {ScalarType::Float}, 1, grad.numel());
  if (!(density > 0 && density <= 1)) {
    checks.fail("density", "be in (0, 1]", std::to_string(density));
  }
  checks.require_in("ranges", "", ranges, {1, kInt32Max});
  checks.require_in("max_samples", "", max_samples, {1, kInt32Max});
  args.inv_scale =
      checks.require_optional<float>("inv_scale", inv_scale, ScalarType::Float, {0, 1}, 1);
  args.grad = grad.const_data_ptr();
  args.residual = residual.const_data_ptr<float>();
  args.numel = grad.numel();
  args.ranges = ranges;
  args.density = density;
  args.max_samples = max_samples;
  args.seed = static_cast<uint32_t>(seed);
  return args;
}

MaskPackArgs mask_pack_args(const Tensor& residual, const Tensor& grad, const Tensor& threshold,
                            const Tensor& payload, const Tensor& seen, int64_t capacity,
                            ScalarType value_dtype, const OptionalTensor& inv_scale) {
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
  args.inv_scale =
      checks.require_optional<float>("inv_scale", inv_scale, ScalarType::Float, {0, 1}, 1);
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
  return args;
}

ScatterUnpackArgs scatter_unpack_args(const Tensor& payloads, const Tensor& out, int64_t capacity,
                                      ScalarType value_dtype, double scale,
                                      const OptionalTensor& out_scale) {
  const Checks checks("scatter_unpack", out);
  ScatterUnpackArgs args{};
  args.out_dtype = checks.require_tensor("out", out, kFloats, 1);
  checks.require_tensor("payloads", payloads, {ScalarType::Byte}, {2, 3});
  checks.require_in("capacity", "", capacity, {1, kUint32Max});
  args.value_dtype = checks.require_dtype("value_dtype", value_dtype, kPayloadValues);
  args.out_scale =
      checks.require_optional<float>("out_scale", out_scale, ScalarType::Float, {0, 1}, 1);
  args.numel = out.numel();
  args.ranges =
      checks.require_payload("payloads", payloads, 3, args.numel, capacity, args.value_dtype);
  checks.require_apart({{"out", out}, {"payloads", payloads}, {"out_scale", out_scale}}, 1);
  args.payloads = payloads.const_data_ptr<uint8_t>();
  args.ranks = payloads.size(0);
  args.capacity = capacity;
  args.out = out.mutable_data_ptr();
  args.scale = static_cast<float>(scale);
  return args;
}

QuantizePackArgs quantize_pack_args(const OptionalTensor& residual, const Tensor& grad,
                                    const Tensor& payload, const std::string& format,
                                    const OptionalTensor& inv_scale) {
  const Checks checks("quantize_pack", payload);
  QuantizePackArgs args{};
  checks.require_tensor("payload", payload, {ScalarType::Byte}, {1, 2});
  args.numel = grad.numel();
  if (residual.has_value()) {
    checks.require_tensor("residual", *residual, {ScalarType::Float}, 1);
    args.residual = residual->mutable_data_ptr<float>();
    args.numel = residual->numel();
  }
  args.grad_dtype = checks.require_tensor("grad", grad, kFloats, 1, args.numel);
  args.grad = grad.const_data_ptr();
  args.format = checks.require_payload_format(format);
  args.inv_scale =
      checks.require_optional<float>("inv_scale", inv_scale, ScalarType::Float, {0, 1}, 1);
  args.ranges = checks.require_quantized("payload", payload, 2, args.numel, args.format);
  checks.require_apart(
      {{"residual", residual}, {"payload", payload}, {"grad", grad}, {"inv_scale", inv_scale}}, 2);
  args.payload = payload.mutable_data_ptr<uint8_t>();
  args.nbytes = payload.size(payload.dim() - 1);
  return args;
}

DequantizeSumArgs dequantize_sum_args(const Tensor& payloads, const Tensor& out,
                                      const std::string& format, double scale,
                                      const OptionalTensor& out_scale) {
  const Checks checks("dequantize_sum", out);
  DequantizeSumArgs args{};
  args.out_dtype = checks.require_tensor("out", out, kFloats, 1);
  checks.require_tensor("payloads", payloads, {ScalarType::Byte}, {2, 3});
  args.format = checks.require_payload_format(format);
  args.out_scale =
      checks.require_optional<float>("out_scale", out_scale, ScalarType::Float, {0, 1}, 1);
  args.numel = out.numel();
  args.ranges = checks.require_quantized("payloads", payloads, 3, args.numel, args.format);
  checks.require_apart({{"out", out}, {"payloads", payloads}, {"out_scale", out_scale}}, 1);
  args.payloads = payloads.const_data_ptr<uint8_t>();
  args.ranks = payloads.size(0);
  args.nbytes = payloads.size(payloads.dim() - 1);
  args.out = out.mutable_data_ptr();
  args.scale = static_cast<float>(scale);
  return args;
}

DequantizeSumPackArgs dequantize_sum_pack_args(const Tensor& payloads, const Tensor& residual,
                                               const Tensor& payload, const std::string& format,
                                               double scale) {
  const Checks checks("dequantize_sum_pack", residual);
  DequantizeSumPackArgs args{};
  checks.require_tensor("residual", residual, {ScalarType::Float}, 1);
  checks.require_tensor("payloads", payloads, {ScalarType::Byte}, 2);
  checks.require_tensor("payload", payload, {ScalarType::Byte}, 1);
  args.format = checks.require_payload_format(format);
  args.numel = residual.numel();
  checks.require_quantized("payloads", payloads, 3, args.numel, args.format);
  checks.require_quantized("payload", payload, 2, args.numel, args.format);
  checks.require_apart({{"residual", residual}, {"payload", payload}, {"payloads", payloads}}, 2);
  args.payloads = payloads.const_data_ptr<uint8_t>();
  args.ranks = payloads.size(0);
  args.nbytes_in = payloads.size(1);
  args.residual = residual.mutable_data_ptr<float>();
  args.payload = payload.mutable_data_ptr<uint8_t>();
  args.nbytes = payload.size(0);
  args.scale = static_cast<float>(scale);
  return args;
}

RowPackArgs row_pack_args(const Tensor& x, int64_t k, ScalarType value_dtype) {
  return top_k_args<RowPackArgs>(Checks("row_pack", x), x, k, value_dtype);
}

RowGatherArgs row_gather_args(const Tensor& x, const Tensor& positions, int64_t k,
                              ScalarType value_dtype) {
  const Checks checks("row_gather", x);
  auto args = top_k_args<RowGatherArgs>(checks, x, k, value_dtype);
  args.positions = checks.require_positions(positions, args.rows, args.width, k);
  return args;
}

RowUnpackArgs row_unpack_args(const Tensor& values, const Tensor& positions, int64_t width,
                              ScalarType dtype) {
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
  return args;
}

RowQuantizeArgs row_quantize_args(const Tensor& x, const std::string& format) {
  const Checks checks("row_quantize", x);
  RowQuantizeArgs args{};
  args.x_dtype = checks.require_tensor("x", x, kFloats, 2);
  args.x = x.const_data_ptr();
  args.rows = x.size(0);
  args.width = x.size(1);
  args.format = checks.require_format(format);
  checks.require_in("x", ".size(1)", args.width, {1, kInt32Max});
  return args;
}

RowDequantizeArgs row_dequantize_args(const Tensor& rows, int64_t width, const std::string& format,
                                      ScalarType dtype) {
  const Checks checks("row_dequantize", rows);
  RowDequantizeArgs args{};
  checks.require_tensor("rows", rows, {ScalarType::Byte}, 2);
  checks.require_in("width", "", width, {1, kInt32Max});
  args.format = checks.require_format(format);
  args.out_dtype = checks.require_dtype("dtype", dtype, kFloats);
  checks.require_in("rows", ".size(1)", rows.size(1), row_bytes(width, args.format));
  args.quantized = rows.const_data_ptr<uint8_t>();
  args.rows = rows.size(0);
  args.width = width;
  return args;
}

}  // namespace dct
