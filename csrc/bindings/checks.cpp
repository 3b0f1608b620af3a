#include "checks.h"

#include <torch/csrc/stable/device.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>

namespace dct {
namespace {

using torch::headeronly::DeviceType;

// The names Python shows.
std::string name(ScalarType dtype) {
  static constexpr std::pair<ScalarType, const char*> kNames[] = {
      {ScalarType::Float, "float32"}, {ScalarType::Double, "float64"},
      {ScalarType::Half, "float16"},  {ScalarType::BFloat16, "bfloat16"},
      {ScalarType::Byte, "uint8"},    {ScalarType::Char, "int8"},
      {ScalarType::Short, "int16"},   {ScalarType::Int, "int32"},
      {ScalarType::Long, "int64"},    {ScalarType::Bool, "bool"},
  };
  for (const auto& [each, text] : kNames) {
    if (each == dtype) return text;
  }
  return torch::headeronly::toString(dtype);
}

std::string names(std::initializer_list<ScalarType> dtypes) {
  std::string text;
  for (const ScalarType& dtype : dtypes) {
    if (!text.empty()) text += &dtype + 1 == dtypes.end() ? " or " : ", ";
    text += name(dtype);
  }
  return text;
}

std::string name(torch::stable::Device device) {
  if (device.type() == DeviceType::CPU) return "cpu";
  if (device.type() == DeviceType::CUDA) return "cuda:" + std::to_string(device.index());
  if (device.type() == DeviceType::Meta) return "meta";
  return "device type " + std::to_string(static_cast<int>(device.type()));
}

DType to_dtype(ScalarType dtype) {
  return dtype == ScalarType::BFloat16 ? DType::kBFloat16
         : dtype == ScalarType::Half   ? DType::kFloat16
                                       : DType::kFloat32;
}

// The bytes that both have, 0 or less if none.
int64_t overlap(const Tensor& a, const Tensor& b) {
  const auto* start_a = static_cast<const uint8_t*>(a.const_data_ptr());
  const auto* start_b = static_cast<const uint8_t*>(b.const_data_ptr());
  const uint8_t* end_a = start_a + a.numel() * a.element_size();
  const uint8_t* end_b = start_b + b.numel() * b.element_size();
  if (start_a == end_a || start_b == end_b) return 0;  // of any address
  return std::min(end_a, end_b) - std::max(start_a, start_b);
}

}  // namespace

// Not STD_TORCH_CHECK, which puts the source file in front of the text. Nor a stream: to write an
// integer to one crashes where the process has loaded a C++ library other than we were built with.
void Checks::fail(const char* arg, const std::string& rule, const std::string& got,
                  const char* verb) const {
  throw std::runtime_error(std::string("dct::") + op_ + ": " + arg + " must " + verb + ' ' + rule +
                           ", got " + got);
}

void Checks::require_int(const char* arg, int64_t value, int64_t low, int64_t high) const {
  if (value < low || value > high) {
    fail(arg, "in [" + std::to_string(low) + ", " + std::to_string(high) + "]", value);
  }
}

void Checks::require_density(double density) const {
  if (density > 0 && density <= 1) return;
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", density);
  fail("density", "in (0, 1]", std::string(text));
}

DType Checks::require_dtype(const char* arg, ScalarType dtype,
                            std::initializer_list<ScalarType> allowed) const {
  if (std::find(allowed.begin(), allowed.end(), dtype) == allowed.end()) {
    fail(arg, names(allowed), name(dtype));
  }
  return to_dtype(dtype);
}

DType Checks::require_tensor(const Arg& arg, std::initializer_list<ScalarType> dtypes,
                             std::initializer_list<int64_t> dims, const Arg& like) const {
  const Tensor& tensor = *arg.tensor;
  const DType dtype = require_dtype(arg.name, tensor.scalar_type(), dtypes);
  if (std::find(dims.begin(), dims.end(), tensor.dim()) == dims.end()) {
    std::string rule;
    for (int64_t dim : dims) rule += (rule.empty() ? "" : " or ") + std::to_string(dim) + "-D";
    fail(arg.name, rule, std::to_string(tensor.dim()) + "-D");
  }
  if (tensor.device() != like.tensor->device()) {
    fail(arg.name, "on " + name(like.tensor->device()) + " like " + like.name,
         name(tensor.device()));
  }
  if (!tensor.is_contiguous()) {
    std::string strides;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      strides += (dim > 0 ? ", " : "") + std::to_string(tensor.stride(dim));
    }
    fail(arg.name, "contiguous", "strides (" + strides + (tensor.dim() == 1 ? ",)" : ")"));
  }
  return dtype;
}

void Checks::require_numel(const Arg& arg, int64_t numel, const char* why) const {
  if (arg.tensor->numel() != numel) {
    fail(arg.name, std::to_string(numel) + (numel == 1 ? " element " : " elements ") + why,
         arg.tensor->numel(), "have");
  }
}

const float* Checks::require_scale(const Arg& arg, const Arg& like) const {
  if (arg.tensor == nullptr) return nullptr;
  require_tensor(arg, {ScalarType::Float}, {0, 1}, like);
  if (arg.tensor->numel() != 1) fail(arg.name, "1 element", arg.tensor->numel(), "have");
  return arg.tensor->const_data_ptr<float>();
}

void Checks::require_segments(const Tensor& segments, const Arg& like) const {
  require_tensor({"segments", segments}, {ScalarType::Long}, {1}, like);
  if (segments.numel() < 1) fail("segments", "at least 1 element", 0, "have");
}

void Checks::require_aligned(const Arg& arg) const {
  const auto rest = reinterpret_cast<uintptr_t>(arg.tensor->const_data_ptr()) % 16;
  if (rest != 0) fail(arg.name, "16-byte aligned", "address % 16 = " + std::to_string(rest));
}

void Checks::require_apart(std::initializer_list<Arg> written,
                           std::initializer_list<Arg> read) const {
  for (const Arg& arg : written) {
    auto check = [&](const Arg& other) {
      const int64_t shared = other.tensor == nullptr ? 0 : overlap(*arg.tensor, *other.tensor);
      if (shared > 0) {
        fail(other.name, std::string("no memory with ") + arg.name,
             std::to_string(shared) + " bytes", "share");
      }
    };
    std::for_each(&arg + 1, written.end(), check);
    std::for_each(read.begin(), read.end(), check);
  }
}

void Checks::require_ascending(const Tensor& segments, int64_t numel) const {
  const int64_t* bounds = segments.const_data_ptr<int64_t>();
  const int64_t size = segments.numel();
  if (bounds[0] == 0 && bounds[size - 1] == numel && std::is_sorted(bounds, bounds + size)) return;
  std::string text;
  for (int64_t i = 0; i < std::min<int64_t>(size, 8); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(bounds[i]);
  }
  fail("segments", "ascending from 0 to " + std::to_string(numel),
       "[" + text + (size > 8 ? ", ...]" : "]"));
}

}  // namespace dct
