#include "contract.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <stdexcept>

#include "../common/payload.h"
#include "../common/rows.h"

namespace dct {
namespace {

using ScalarTypes = std::initializer_list<ScalarType>;

constexpr ScalarTypes kFloats = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
constexpr ScalarTypes kPayloadValues = {ScalarType::Float, ScalarType::BFloat16};
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kUint32Max = std::numeric_limits<uint32_t>::max();

struct Interval {
  Interval(int64_t value) : low(value), high(value) {}
  Interval(int64_t low, int64_t high) : low(low), high(high) {}
  int64_t low, high;
};
const Interval kAny = {0, std::numeric_limits<int64_t>::max()};

struct NamedTensor {
  NamedTensor(const char* name, const Tensor& value) : name(name), tensor(&value) {}
  NamedTensor(const char* name, const OptionalTensor& value)
      : name(name), tensor(value.has_value() ? &*value : nullptr) {}
  const char* name;
  const Tensor* tensor;  // null if absent
};

class Checks {
 public:
  // All tensors must be on the device of `like`.
  Checks(const char* op, const Tensor& like) : op_(op), device_(like.device()) {}

  // Not STD_TORCH_CHECK, which puts the source file in front of the text. Nor a stream: writing an
  // integer to one crashes in a process that has loaded another C++ library than we were built
  // with.
  [[noreturn]] void fail(const std::string& arg, const std::string& rule,
                         const std::string& got) const {
    throw std::runtime_error(std::string("dct::") + op_ + ": " + arg + " must " + rule + ", got " +
                             got);
  }

  // `part`: of the argument, such as ".dim()", or "" where the argument itself is the value.
  void require_in(const char* arg, const char* part, int64_t value, Interval allowed) const {
    if (value >= allowed.low && value <= allowed.high) return;
    std::string rule = "be " + std::to_string(allowed.low);
    if (allowed.high != allowed.low) rule += " to " + std::to_string(allowed.high);
    fail(std::string(arg) + part, rule, std::to_string(value));
  }

  DType require_dtype(const char* arg, ScalarType dtype, ScalarTypes allowed) const {
    if (std::find(allowed.begin(), allowed.end(), dtype) == allowed.end()) {
      std::string rule;
      for (ScalarType each : allowed) {
        rule += (rule.empty() ? "be " : " or ") + std::string(torch::headeronly::toString(each));
      }
      fail(arg, rule, torch::headeronly::toString(dtype));
    }
    return dtype == ScalarType::BFloat16 ? DType::kBFloat16
           : dtype == ScalarType::Half   ? DType::kFloat16
                                         : DType::kFloat32;
  }

  DType require_tensor(const char* arg, const Tensor& tensor, ScalarTypes dtypes, Interval dims,
                       Interval numel = kAny) const {
    const DType dtype = require_dtype(arg, tensor.scalar_type(), dtypes);
    require_in(arg, ".dim()", tensor.dim(), dims);
    if (tensor.device() != device_) fail(arg, "be on " + name(device_), name(tensor.device()));
    if (!tensor.is_contiguous()) fail(arg, "be contiguous", "other strides");
    require_in(arg, ".numel()", tensor.numel(), numel);
    return dtype;
  }

  // Returns the tensor's data, or null if it is absent.
  template <typename T>
  const T* require_optional(const char* arg, const OptionalTensor& tensor, ScalarType dtype,
                            Interval dims, Interval numel) const {
    if (!tensor.has_value()) return nullptr;
    require_tensor(arg, *tensor, {dtype}, dims, numel);
    return tensor->const_data_ptr<T>();
  }

  // Returns the number of segments. The offsets themselves are checked on the CPU only.
  int64_t require_segments(const Tensor& segments, int64_t numel) const {
    require_tensor("segments", segments, {ScalarType::Long}, 1);
    if (segments.numel() < 1) fail("segments", "have at least 1 element", "0");
    if (device_.is_cpu()) {
      const int64_t* begin = segments.const_data_ptr<int64_t>();
      const int64_t *end = begin + segments.numel(), *wrong = std::is_sorted_until(begin, end);
      if (begin[0] != 0) wrong = begin;
      if (wrong == end && end[-1] != numel) --wrong;
      if (wrong != end) {
        fail("segments", "ascend from 0 to " + std::to_string(numel), std::to_string(*wrong));
      }
    }
    return segments.numel() - 1;
  }

  // Checks payloads [.., nbytes] and returns their number of ranges.
  int64_t require_payload(const char* arg, const Tensor& payload, int64_t dims_with_ranges,
                          int64_t numel, int64_t capacity, DType value_dtype) const {
    const int64_t dims = payload.dim();
    const int64_t ranges = dims == dims_with_ranges ? payload.size(dims - 2) : 1;
    if (ranges < 1) fail(arg, "have at least 1 range", "0");
    const int64_t nbytes = payload_layout(numel, capacity, value_dtype, ranges).nbytes;
    require_in(arg, ".size(-1)", payload.size(dims - 1), nbytes);
    const auto address = reinterpret_cast<uintptr_t>(payload.const_data_ptr());
    if (address % 16 != 0) {
      fail(arg, "be 16-byte aligned", "address % 16 = " + std::to_string(address % 16));
    }
    return ranges;
  }

  const uint8_t* require_positions(const Tensor& positions, int64_t rows, int64_t width,
                                   int64_t k) const {
    require_tensor("positions", positions, {ScalarType::Byte}, 2);
    require_in("positions", ".size(0)", positions.size(0), rows);
    require_in("positions", ".size(1)", positions.size(1), position_bytes(width, k));
    return positions.const_data_ptr<uint8_t>();
  }

  RowFormat require_format(const std::string& format) const {
    constexpr const char* kNames[] = {"int8", "int4", "ternary", "sign"};  // in RowFormat's order
    for (int i = 0; i < 4; ++i) {
      if (format == kNames[i]) return static_cast<RowFormat>(i);
    }
    fail("format", "be int8, int4, ternary or sign", "'" + format + "'");
  }

  // The first `written` tensors share memory with no other.
  void require_apart(std::initializer_list<NamedTensor> tensors, int written) const {
    for (auto a = tensors.begin(); a != tensors.begin() + written; ++a) {
      for (auto b = a + 1; b != tensors.end(); ++b) {
        const int64_t shared = b->tensor == nullptr ? 0 : overlap(*a->tensor, *b->tensor);
        if (shared > 0) {
          fail(b->name, std::string("share no memory with ") + a->name,
               std::to_string(shared) + " bytes");
        }
      }
    }
  }

 private:
  static std::string name(torch::stable::Device device) {
    return device.is_cuda() ? "cuda:" + std::to_string(device.index()) : "cpu";
  }

  // The bytes that both have, 0 or less if none.
  static int64_t overlap(const Tensor& a, const Tensor& b) {
    const auto* start_a = static_cast<const uint8_t*>(a.const_data_ptr());
    const auto* start_b = static_cast<const uint8_t*>(b.const_data_ptr());
    return std::min(start_a + a.numel() * a.element_size(),
                    start_b + b.numel() * b.element_size()) -
           std::max(start_a, start_b);
  }

  const char* op_;
  torch::stable::Device device_;
};

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

SampleThresholdArgs sample_threshold_args(const Tensor& x, const OptionalTensor& residual,
                                          const Tensor& segments, double density,
                                          int64_t max_samples, int64_t seed,
                                          const OptionalTensor& inv_scale) {
  const Checks checks("sample_threshold", x);
  SampleThresholdArgs args{};
  args.x_dtype = checks.require_tensor("x", x, kFloats, 1);
  args.residual =
      checks.require_optional<float>("residual", residual, ScalarType::Float, 1, x.numel());
  args.num_segments = checks.require_segments(segments, x.numel());
  if (!(density > 0 && density <= 1)) {
    checks.fail("density", "be in (0, 1]", std::to_string(density));
  }
  checks.require_in("max_samples", "", max_samples, {1, kInt32Max});
  args.inv_scale =
      checks.require_optional<float>("inv_scale", inv_scale, ScalarType::Float, {0, 1}, 1);
  args.x = x.const_data_ptr();
  args.segments = segments.const_data_ptr<int64_t>();
  args.density = density;
  args.max_samples = max_samples;
  args.seed = static_cast<uint32_t>(seed);
  return args;
}

MaskPackArgs mask_pack_args(const Tensor& residual, const OptionalTensor& grad,
                            const Tensor& segments, const Tensor& threshold, const Tensor& payload,
                            const Tensor& seen, int64_t capacity, ScalarType value_dtype,
                            const OptionalTensor& inv_scale, const OptionalTensor& status) {
  const Checks checks("mask_pack", residual);
  MaskPackArgs args{};
  checks.require_tensor("residual", residual, {ScalarType::Float}, 1);
  args.numel = residual.numel();
  if (grad.has_value()) {
    args.grad_dtype = checks.require_tensor("grad", *grad, kFloats, 1, args.numel);
    args.grad = grad->const_data_ptr();
  }
  args.num_segments = checks.require_segments(segments, args.numel);
  checks.require_tensor("threshold", threshold, {ScalarType::Float}, 1, args.num_segments);
  checks.require_tensor("payload", payload, {ScalarType::Byte}, {1, 2});
  checks.require_tensor("seen", seen, {ScalarType::Int}, 1, args.num_segments);
  checks.require_in("capacity", "", capacity, {1, kUint32Max});
  args.value_dtype = checks.require_dtype("value_dtype", value_dtype, kPayloadValues);
  args.inv_scale =
      checks.require_optional<float>("inv_scale", inv_scale, ScalarType::Float, {0, 1}, 1);
  args.status = checks.require_optional<int32_t>("status", status, ScalarType::Int, 1, kAny);
  args.num_status = status.has_value() ? status->numel() : 0;
  args.ranges =
      checks.require_payload("payload", payload, 2, args.numel, capacity, args.value_dtype);
  checks.require_apart({{"residual", residual},
                        {"payload", payload},
                        {"seen", seen},
                        {"grad", grad},
                        {"segments", segments},
                        {"threshold", threshold},
                        {"inv_scale", inv_scale},
                        {"status", status}},
                       3);
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
  args.accumulate = accumulate;
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
