#pragma once

// Access to elements whose dtype is known only at run time. All threads of a kernel take the same
// branch.

#include "../../common/floats.h"
#include "device.cuh"

namespace dct::cuda {

__device__ inline float load_element(const void* data, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return to_float(static_cast<const BFloat16*>(data)[index]);
    case DType::kFloat16:
      return to_float(static_cast<const Float16*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

__device__ inline void store_element(void* data, int64_t index, float x, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<BFloat16*>(data)[index] = round_to<BFloat16>(x);
      break;
    case DType::kFloat16:
      static_cast<Float16*>(data)[index] = round_to<Float16>(x);
      break;
    default:
      static_cast<float*>(data)[index] = round_to<float>(x);
  }
}

}  // namespace dct::cuda
