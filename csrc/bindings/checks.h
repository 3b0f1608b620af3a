#pragma once

// Argument checks that the ops in ops.cpp share.

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "../common/patch.h"
#include "../common/payload.h"
#include "../common/quantized_payload.h"
#include "../common/row_layout.h"

namespace dct {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using ScalarTypes = std::initializer_list<ScalarType>;

constexpr ScalarTypes kFloats = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
constexpr ScalarTypes kHalves = {ScalarType::BFloat16, ScalarType::Half};
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

struct Checks {
  Checks(const char* op, const Tensor& like) : op(op), like(like) {}

  const char* op;
  const Tensor& like;  // every tensor must be on the device of this one

  // STD_TORCH_CHECK would put the source file in front of the text. A stream would crash when it
  // writes an integer, if the process has loaded a different C++ library than this build used.
  [[noreturn]] void fail(const std::string& arg, const std::string& rule,
                         const std::string& got) const {
    throw std::runtime_error(std::string("dct::") + op + ": " + arg + " must " + rule + ", got " +
                             got);
  }

  // `part` is the checked property, such as ".dim()", or "" if the argument itself is the value.
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
        rule += (rule.empty() ? "be " : " or ") + name(each);
      }
      fail(arg, rule, name(dtype));
    }
    return dtype == ScalarType::BFloat16 ? DType::kBFloat16
           : dtype == ScalarType::Half   ? DType::kFloat16
                                         : DType::kFloat32;
  }

  DType require_tensor(const char* arg, const Tensor& tensor, ScalarTypes dtypes, Interval dims,
                       Interval numel = kAny) const {
    const DType dtype = require_dtype(arg, tensor.scalar_type(), dtypes);
    require_in(arg, ".dim()", tensor.dim(), dims);
    if (tensor.device() != like.device()) {
      fail(arg, "be on " + name(like.device()), name(tensor.device()));
    }
    if (!tensor.is_contiguous()) fail(arg, "be contiguous", "other strides");
    require_in(arg, ".numel()", tensor.numel(), numel);
    return dtype;
  }

  // Returns the address of the scale, or null if the scale is absent.
  const float* require_scale(const char* arg, const OptionalTensor& scale) const {
    if (!scale.has_value()) return nullptr;
    require_tensor(arg, *scale, {ScalarType::Float}, {0, 1}, 1);
    return scale->const_data_ptr<float>();
  }

  // Checks payloads [.., nbytes] and returns the number of ranges.
  int64_t require_payload(const char* arg, const Tensor& payload, int64_t dims_with_ranges,
                          int64_t numel, int64_t capacity, DType value_dtype) const {
    const int64_t ranges = require_ranges(arg, payload, dims_with_ranges);
    const int64_t nbytes = payload_layout(numel, capacity, value_dtype, ranges).nbytes;
    require_in(arg, ".size(-1)", payload.size(payload.dim() - 1), nbytes);
    return ranges;
  }

  // Checks dense payloads, and fills the ranges of `args`. The rows of a two-dimensional tensor of
  // elements are its ranges.
  template <typename Args>
  void require_quantized(const char* arg, const Tensor& payload, int64_t dims_with_ranges,
                         const Tensor& elements, Args& args) const {
    args.ranges = require_ranges(arg, payload, dims_with_ranges);
    args.nbytes = payload.size(payload.dim() - 1);
    args.range_length = range_length(args.numel, args.ranges);
    if (elements.dim() == 2) {
      require_in(arg, ".size(-2)", args.ranges, elements.size(0));
      if (args.ranges > 1) args.range_length = elements.size(1);
    }
    const int64_t least =
        quantized_payload_bytes(std::min(args.numel, args.range_length), args.format);
    if (args.nbytes < least || args.nbytes % 16 != 0) {
      fail(std::string(arg) + ".size(-1)",
           "be " + std::to_string(least) + " or a multiple of 16 above",
           std::to_string(args.nbytes));
    }
  }

  // Checks the alignment and returns the number of ranges.
  int64_t require_ranges(const char* arg, const Tensor& payload, int64_t dims_with_ranges) const {
    const int64_t dims = payload.dim();
    const int64_t ranges = dims == dims_with_ranges ? payload.size(dims - 2) : 1;
    if (ranges < 1) fail(arg, "have at least 1 range", "0");
    require_aligned(arg, payload);
    return ranges;
  }

  void require_aligned(const char* arg, const Tensor& payload) const {
    const auto address = reinterpret_cast<uintptr_t>(payload.const_data_ptr());
    if (address % 16 != 0) {
      fail(arg, "be 16-byte aligned", "address % 16 = " + std::to_string(address % 16));
    }
  }

  const uint8_t* require_positions(const Tensor& positions, int64_t rows, int64_t width,
                                   int64_t k) const {
    require_tensor("positions", positions, {ScalarType::Byte}, 2);
    require_in("positions", ".size(0)", positions.size(0), rows);
    require_in("positions", ".size(1)", positions.size(1), position_bytes(width, k));
    return positions.const_data_ptr<uint8_t>();
  }

  RowFormat require_format(const std::string& format) const {
    constexpr const char* kNames[] = {"int8", "int4", "sign"};  // in RowFormat's order
    for (int i = 0; i < 3; ++i) {
      if (format == kNames[i]) return static_cast<RowFormat>(i);
    }
    fail("format", "be int8, int4 or sign", "'" + format + "'");
  }

  PayloadFormat require_payload_format(const std::string& format) const {
    constexpr std::pair<const char*, PayloadFormat> kNamed[] = {
        {"float32", PayloadFormat::kFloat32},
        {"bfloat16", PayloadFormat::kBFloat16},
        {"int8", PayloadFormat::kInt8},
        {"int4", PayloadFormat::kInt4},
        {"ternary", PayloadFormat::kTernary}};
    for (const auto& [name, value] : kNamed) {
      if (format == name) return value;
    }
    fail("format", "be float32, bfloat16, int8, int4 or ternary", "'" + format + "'");
  }

  // The first `written` tensors must not share memory with any other tensor.
  void require_apart(std::initializer_list<NamedTensor> tensors, int written) const {
    for (auto a = tensors.begin(); a != tensors.begin() + written; ++a) {
      if (a->tensor == nullptr) continue;
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
  // The name of a dtype in Python.
  static std::string name(ScalarType dtype) {
    constexpr std::pair<ScalarType, const char*> kNamed[] = {
        {ScalarType::Float, "float32"},     {ScalarType::Double, "float64"},
        {ScalarType::BFloat16, "bfloat16"}, {ScalarType::Half, "float16"},
        {ScalarType::Byte, "uint8"},        {ScalarType::Char, "int8"},
        {ScalarType::Short, "int16"},       {ScalarType::Int, "int32"},
        {ScalarType::Long, "int64"},        {ScalarType::Bool, "bool"}};
    for (const auto& [value, name] : kNamed) {
      if (dtype == value) return name;
    }
    return torch::headeronly::toString(dtype);
  }

  static std::string name(torch::stable::Device device) {
    return device.is_cuda() ? "cuda:" + std::to_string(device.index()) : "cpu";
  }

  // The number of bytes that the two tensors share. 0 or negative if they do not overlap.
  static int64_t overlap(const Tensor& a, const Tensor& b) {
    const auto* start_a = static_cast<const uint8_t*>(a.const_data_ptr());
    const auto* start_b = static_cast<const uint8_t*>(b.const_data_ptr());
    return std::min(start_a + a.numel() * a.element_size(),
                    start_b + b.numel() * b.element_size()) -
           std::max(start_a, start_b);
  }
};

}  // namespace dct
