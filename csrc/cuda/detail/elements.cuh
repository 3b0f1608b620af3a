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

// residual + grad * scale, product and sum rounded apart: never a fused multiply-add.
template <typename Grad>
__device__ float accumulate(float residual, Grad grad, float scale) {
  return __fadd_rn(residual, __fmul_rn(to_float(grad), scale));
}
__device__ inline float accumulate(float residual, NoGrad, float) { return residual; }

// What a payload takes of a sum, in its low bits, and what it leaves in the residual: value + left
// is the sum. Whatever rounds values rounds them here. Exact: of float32 nothing is left, and the
// sum less its bfloat16 has at most 16 significant bits, also where it saturates or is subnormal,
// so that `restore` gives back every bit.
struct Taken {
  uint32_t bits;
  float left;
};
__device__ inline float payload_value(uint32_t bits, DType value_dtype) {
  return bits_to_float(value_dtype == DType::kBFloat16 ? bits << 16 : bits);
}
__device__ inline Taken take(float sum, DType value_dtype) {
  const uint32_t bits = value_dtype == DType::kBFloat16
                            ? round_saturating<BFloat16>(sum).bits
                            : float_to_bits(round_saturating<float>(sum));
  return {bits, __fsub_rn(sum, payload_value(bits, value_dtype))};
}
__device__ inline float restore(float left, uint32_t bits, DType value_dtype) {
  return __fadd_rn(left, payload_value(bits, value_dtype));
}

__device__ inline void store_value(uint8_t* values, uint32_t index, uint32_t bits,
                                   DType value_dtype) {
  if (value_dtype == DType::kBFloat16) {
    reinterpret_cast<uint16_t*>(values)[index] = static_cast<uint16_t>(bits);
  } else {
    reinterpret_cast<uint32_t*>(values)[index] = bits;
  }
}
__device__ inline uint32_t load_value(const uint8_t* values, uint32_t index, DType value_dtype) {
  return value_dtype == DType::kBFloat16 ? reinterpret_cast<const uint16_t*>(values)[index]
                                         : reinterpret_cast<const uint32_t*>(values)[index];
}

}  // namespace dct::cuda
