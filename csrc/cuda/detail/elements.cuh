#pragma once

// A gradient of any dtype, or none, on its way into the residual, and an entry on its way into the
// payload.

#include "../../common/e3m0.h"
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
// is the sum.
struct Taken {
  uint32_t bits;
  float left;
};

// Whatever rounds values rounds them here. Exact: of float32 nothing is left, and the sum less its
// bfloat16 has at most 16 significant bits, also where it saturates or is subnormal (e3m0.h says
// why its codes are), so that `restore` gives back every bit.
struct ValueFormat {
  static constexpr uint32_t kNoCode = 16;  // bits of a sum that e3m0 cannot send

  DType dtype;
  uint32_t scale;  // of e3m0, its biased exponent

  __device__ bool is_e3m0() const { return dtype == DType::kE3M0; }
  __device__ bool sends(float sum) const { return !is_e3m0() || E3M0Scale(scale).holds(sum); }
  __device__ bool sends_nothing(uint32_t bits) const { return is_e3m0() && bits == kNoCode; }

  __device__ float value(uint32_t bits) const {
    if (is_e3m0()) return E3M0Scale(scale).value(bits);
    return bits_to_float(dtype == DType::kBFloat16 ? bits << 16 : bits);
  }
  __device__ Taken take(float sum) const {
    if (!sends(sum)) return {kNoCode, sum};
    const uint32_t bits = is_e3m0()                   ? E3M0Scale(scale).code(sum)
                          : dtype == DType::kBFloat16 ? round_saturating<BFloat16>(sum).bits
                                                      : float_to_bits(round_saturating<float>(sum));
    return {bits, __fsub_rn(sum, value(bits))};
  }
  __device__ float restore(float left, uint32_t bits) const { return __fadd_rn(left, value(bits)); }
};

__device__ inline void store_value(uint8_t* values, uint32_t index, uint32_t bits,
                                   DType value_dtype) {
  if (itemsize(value_dtype) == 2) {
    reinterpret_cast<uint16_t*>(values)[index] = static_cast<uint16_t>(bits);
  } else {
    reinterpret_cast<uint32_t*>(values)[index] = bits;
  }
}
__device__ inline uint32_t load_value(const uint8_t* values, uint32_t index, DType value_dtype) {
  return itemsize(value_dtype) == 2 ? reinterpret_cast<const uint16_t*>(values)[index]
                                    : reinterpret_cast<const uint32_t*>(values)[index];
}

}  // namespace dct::cuda
