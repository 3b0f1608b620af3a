#pragma once

#include <cstdint>

#include "host_device.h"

namespace dct {

// 0 and 1 are also the payload's codes of its value dtype.
enum class DType : uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

DCT_HOST_DEVICE constexpr int64_t itemsize(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Calls `function` with a value of the C++ type of `dtype`: the one way from a run-time dtype to a
// template argument.
template <typename Function>
decltype(auto) dispatch(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kBFloat16:
      return function(BFloat16{});
    case DType::kFloat16:
      return function(Float16{});
    default:
      return function(float{});
  }
}

// The same for values in a payload, which are float32 or bfloat16.
template <typename Function>
decltype(auto) dispatch_payload_value(DType dtype, Function&& function) {
  return dtype == DType::kBFloat16 ? function(BFloat16{}) : function(float{});
}

}  // namespace dct
