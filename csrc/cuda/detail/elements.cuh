#pragma once

// A gradient of any dtype, or none, on its way into the residual, and an entry on its way into the
// payload.

#include "../../common/dtype.h"
#include "../../common/rounding.h"
#include "vectors.cuh"

namespace dct::cuda {

struct NoGrad {};

template <int N>
__device__ void stream_in(const NoGrad*, NoGrad (&)[N]) {}

// As NoGrad; mask_pack's second kernel reads by fewer vectors.
struct NoGradAgain : NoGrad {};

template <int N>
__device__ void stream_in(const NoGradAgain*, NoGradAgain (&)[N]) {}

// residual + grad * scale, product and sum rounded apart: never a fused multiply-add.
template <typename Grad>
__device__ float accumulate(float residual, Grad grad, float scale) {
  return __fadd_rn(residual, __fmul_rn(to_float(grad), scale));
}
__device__ inline float accumulate(float residual, NoGrad, float) { return residual; }
__device__ inline float accumulate(float residual, NoGradAgain, float) { return residual; }

// What a payload of this dtype makes of x.
__device__ inline float through_payload(float x, DType value_dtype) {
  return value_dtype == DType::kBFloat16 ? to_float(round_saturating<BFloat16>(x)) : x;
}

__device__ inline void store_payload_value(uint8_t* values, int index, float x, DType value_dtype) {
  if (value_dtype == DType::kBFloat16) {
    reinterpret_cast<BFloat16*>(values)[index] = round_saturating<BFloat16>(x);
  } else {
    reinterpret_cast<float*>(values)[index] = round_saturating<float>(x);
  }
}

}  // namespace dct::cuda
