#include "contract.h"

#include <limits>
#include <string>

#include "../common/payload.h"
#include "../common/rows.h"

namespace dct {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kUint32Max = std::numeric_limits<uint32_t>::max();
constexpr const char* kOnePerSegment = "(one per segment)";

// Checks the length of a payload [.., nbytes] and returns its number of ranges.
int64_t require_payload(const Checks& checks, const Arg& arg, int64_t dims_with_ranges,
                        int64_t numel, int64_t capacity, DType value_dtype) {
  const Tensor& payload = *arg.tensor;
  const int64_t dims = payload.dim();
  const int64_t ranges = dims == dims_with_ranges ? payload.size(dims - 2) : 1;
  if (ranges < 1) checks.fail(arg.name, "at least 1 range", ranges, "have");
  const int64_t nbytes = payload_layout(numel, capacity, value_dtype, ranges).nbytes;
  if (payload.size(dims - 1) != nbytes) {
    checks.fail(arg.name,
                std::to_string(nbytes) + " bytes per range for " + std::to_string(numel) +
                    " elements and capacity " + std::to_string(capacity),
                payload.size(dims - 1), "have");
  }
  return ranges;
}

void require_positions(const Checks& checks, const Tensor& positions, int64_t rows, int64_t width,
                       int64_t k, const Arg& like) {
  checks.require_tensor({"positions", positions}, {ScalarType::Byte}, {2}, like);
  const int64_t bytes = position_bytes(width, k);
  auto shape = [](int64_t a, int64_t b) {
    return "[" + std::to_string(a) + ", " + std::to_string(b) + "]";
  };
  if (positions.size(0) != rows || positions.size(1) != bytes) {
    checks.fail("positions",
                "shape " + shape(rows, bytes) + " for width " + std::to_string(width) + " and k " +
                    std::to_string(k),
                shape(positions.size(0), positions.size(1)), "have");
  }
}

RowFormat require_format(const Checks& checks, const std::string& format) {
  constexpr const char* kNames[] = {"int8", "int4", "ternary", "sign"};  // in RowFormat's order
  for (int i = 0; i < 4; ++i) {
    if (format == kNames[i]) return static_cast<RowFormat>(i);
  }
  checks.fail("format", "int8, int4, ternary or sign", "'" + format + "'");
}

}  // namespace

SampleThresholdArgs sample_threshold_args(const Tensor& x, const OptionalTensor& residual,
                                          const Tensor& segments, double density,
                                          int64_t max_samples, int64_t seed,
                                          const OptionalTensor& inv_scale) {
  const Checks checks("sample_threshold");
  const Arg like("x", x);
  SampleThresholdArgs args{};
  args.x_dtype = checks.require_tensor(like, kFloats, {1}, like);
  if (residual.has_value()) {
    const Arg arg("residual", residual);
    checks.require_tensor(arg, {ScalarType::Float}, {1}, like);
    checks.require_numel(arg, x.numel(), "like x");
    args.residual = residual->const_data_ptr<float>();
  }
  checks.require_segments(segments, like);
  checks.require_density(density);
  checks.require_int("max_samples", max_samples, 1, kInt32Max);
  args.inv_scale = checks.require_scale({"inv_scale", inv_scale}, like);
  args.x = x.const_data_ptr();
  args.segments = segments.const_data_ptr<int64_t>();
  args.num_segments = segments.numel() - 1;
  args.density = density;
  args.max_samples = max_samples;
  args.seed = static_cast<uint32_t>(seed);
  return args;
}

MaskPackArgs mask_pack_args(const Tensor& residual, const OptionalTensor& grad,
                            const Tensor& segments, const Tensor& threshold, const Tensor& payload,
                            const Tensor& seen, int64_t capacity, ScalarType value_dtype,
                            const OptionalTensor& inv_scale, const OptionalTensor& status) {
  const Checks checks("mask_pack");
  const Arg like("residual", residual), bytes("payload", payload), counts("seen", seen);
  MaskPackArgs args{};
  checks.require_tensor(like, {ScalarType::Float}, {1}, like);
  args.numel = residual.numel();
  if (grad.has_value()) {
    args.grad_dtype = checks.require_tensor({"grad", grad}, kFloats, {1}, like);
    checks.require_numel({"grad", grad}, args.numel, "like residual");
    args.grad = grad->const_data_ptr();
  }
  checks.require_segments(segments, like);
  args.num_segments = segments.numel() - 1;
  checks.require_tensor({"threshold", threshold}, {ScalarType::Float}, {1}, like);
  checks.require_numel({"threshold", threshold}, args.num_segments, kOnePerSegment);
  checks.require_tensor(bytes, {ScalarType::Byte}, {1, 2}, like);
  checks.require_tensor(counts, {ScalarType::Int}, {1}, like);
  checks.require_numel(counts, args.num_segments, kOnePerSegment);
  checks.require_int("capacity", capacity, 1, kUint32Max);
  args.value_dtype = checks.require_dtype("value_dtype", value_dtype, kPayloadValues);
  args.inv_scale = checks.require_scale({"inv_scale", inv_scale}, like);
  if (status.has_value()) {
    checks.require_tensor({"status", status}, {ScalarType::Int}, {1}, like);
    args.status = status->const_data_ptr<int32_t>();
    args.num_status = status->numel();
  }
  args.ranges = require_payload(checks, bytes, 2, args.numel, capacity, args.value_dtype);
  checks.require_aligned(bytes);
  checks.require_apart({like, bytes, counts}, {{"grad", grad},
                                               {"segments", segments},
                                               {"threshold", threshold},
                                               {"inv_scale", inv_scale},
                                               {"status", status}});
  args.residual = residual.mutable_data_ptr<float>();
  args.segments = segments.const_data_ptr<int64_t>();
  args.threshold = threshold.const_data_ptr<float>();
  args.seen = seen.mutable_data_ptr<int32_t>();
  args.payload = payload.mutable_data_ptr<uint8_t>();
  args.capacity = capacity;
  return args;
}

ScatterUnpackArgs scatter_unpack_args(const Tensor& payloads, const Tensor& out, int64_t capacity,
                                      ScalarType value_dtype, double scale, bool accumulate,
                                      const OptionalTensor& out_scale) {
  const Checks checks("scatter_unpack");
  const Arg like("out", out), bytes("payloads", payloads);
  ScatterUnpackArgs args{};
  args.out_dtype = checks.require_tensor(like, kFloats, {1}, like);
  checks.require_tensor(bytes, {ScalarType::Byte}, {2, 3}, like);
  checks.require_int("capacity", capacity, 1, kUint32Max);
  args.value_dtype = checks.require_dtype("value_dtype", value_dtype, kPayloadValues);
  args.out_scale = checks.require_scale({"out_scale", out_scale}, like);
  args.numel = out.numel();
  args.ranges = require_payload(checks, bytes, 3, args.numel, capacity, args.value_dtype);
  checks.require_aligned(bytes);
  checks.require_apart({like}, {bytes, {"out_scale", out_scale}});
  args.payloads = payloads.const_data_ptr<uint8_t>();
  args.ranks = payloads.size(0);
  args.capacity = capacity;
  args.out = out.mutable_data_ptr();
  args.scale = static_cast<float>(scale);
  args.accumulate = accumulate;
  return args;
}

RowPackArgs row_pack_args(const Tensor& x, int64_t k, ScalarType value_dtype) {
  const Checks checks("row_pack");
  RowPackArgs args{};
  args.x_dtype = checks.require_tensor({"x", x}, kFloats, {2}, {"x", x});
  checks.require_int("k", k, 1, x.size(1));
  args.value_dtype = checks.require_dtype("value_dtype", value_dtype, kFloats);
  args.x = x.const_data_ptr();
  args.rows = x.size(0);
  args.width = x.size(1);
  args.k = k;
  return args;
}

RowGatherArgs row_gather_args(const Tensor& x, const Tensor& positions, int64_t k,
                              ScalarType value_dtype) {
  const Checks checks("row_gather");
  RowGatherArgs args{};
  args.x_dtype = checks.require_tensor({"x", x}, kFloats, {2}, {"x", x});
  checks.require_int("k", k, 1, x.size(1));
  args.value_dtype = checks.require_dtype("value_dtype", value_dtype, kFloats);
  require_positions(checks, positions, x.size(0), x.size(1), k, {"x", x});
  args.x = x.const_data_ptr();
  args.positions = positions.const_data_ptr<uint8_t>();
  args.rows = x.size(0);
  args.width = x.size(1);
  args.k = k;
  return args;
}

RowUnpackArgs row_unpack_args(const Tensor& values, const Tensor& positions, int64_t width,
                              ScalarType dtype) {
  const Checks checks("row_unpack");
  RowUnpackArgs args{};
  args.value_dtype = checks.require_tensor({"values", values}, kFloats, {2}, {"values", values});
  checks.require_int("width", width, 1, kInt32Max);
  checks.require_int("values.shape[1]", values.size(1), 1, width);
  args.out_dtype = checks.require_dtype("dtype", dtype, kFloats);
  require_positions(checks, positions, values.size(0), width, values.size(1), {"values", values});
  args.values = values.const_data_ptr();
  args.positions = positions.const_data_ptr<uint8_t>();
  args.rows = values.size(0);
  args.width = width;
  args.k = values.size(1);
  return args;
}

RowQuantizeArgs row_quantize_args(const Tensor& x, const std::string& format) {
  const Checks checks("row_quantize");
  RowQuantizeArgs args{};
  args.x_dtype = checks.require_tensor({"x", x}, kFloats, {2}, {"x", x});
  checks.require_int("x.shape[1]", x.size(1), 1, kInt32Max);
  args.format = require_format(checks, format);
  args.x = x.const_data_ptr();
  args.rows = x.size(0);
  args.width = x.size(1);
  return args;
}

RowDequantizeArgs row_dequantize_args(const Tensor& rows, int64_t width, const std::string& format,
                                      ScalarType dtype) {
  const Checks checks("row_dequantize");
  const Arg like("rows", rows);
  RowDequantizeArgs args{};
  checks.require_tensor(like, {ScalarType::Byte}, {2}, like);
  checks.require_int("width", width, 1, kInt32Max);
  args.format = require_format(checks, format);
  args.out_dtype = checks.require_dtype("dtype", dtype, kFloats);
  const int64_t bytes = row_bytes(width, args.format);
  if (rows.size(1) != bytes) {
    checks.fail("rows",
                std::to_string(bytes) + " bytes per row for width " + std::to_string(width) +
                    " and format " + format,
                rows.size(1), "have");
  }
  args.quantized = rows.const_data_ptr<uint8_t>();
  args.rows = rows.size(0);
  args.width = width;
  return args;
}

}  // namespace dct
