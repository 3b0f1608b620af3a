#pragma once

// A gradient of any dtype, or none, on its way into the residual, and an entry on its way into the
// payload.

#include "../../common/e3m0.h"
#include "../../common/ops.h"
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
// bfloat16 has at most 16 significant bits, also where it saturates or is subnormal, so that value
// + left gives back every bit.
struct FloatFormat {
  static constexpr bool kE3M0 = false;
  DType dtype;

  __device__ FloatFormat(const MaskPackArgs& args, int) : dtype(args.value_dtype) {}
  __device__ bool sends(float) const { return true; }
  __device__ bool is_sent(uint32_t) const { return true; }
  __device__ float value(uint32_t bits) const {
    return bits_to_float(dtype == DType::kBFloat16 ? bits << 16 : bits);
  }
  __device__ Taken take(float sum) const {
    const uint32_t bits = dtype == DType::kBFloat16 ? round_saturating<BFloat16>(sum).bits
                                                    : float_to_bits(round_saturating<float>(sum));
    return {bits, __fsub_rn(sum, value(bits))};
  }
  __device__ PayloadHeader header(int64_t numel, int64_t capacity, uint64_t kept, bool non_finite,
                                  bool damage) const {
    return payload_header(numel, capacity, dtype, kept, non_finite, damage);
  }
};

// Exact, too: e3m0.h says why. A sum that cannot be sent is left whole, and its bits are no code.
struct E3M0Format {
  static constexpr bool kE3M0 = true;
  static constexpr DType dtype = DType::kBFloat16;  // of which a slot has as many bytes
  static constexpr uint32_t kNoCode = 16;
  E3M0Scale scale;

  __device__ E3M0Format(const MaskPackArgs& args, int range)
      : scale(E3M0Scale::nearest(args.scale[range])) {}
  __device__ bool sends(float sum) const { return scale.holds(sum); }
  __device__ bool is_sent(uint32_t bits) const { return bits != kNoCode; }
  __device__ float value(uint32_t code) const { return scale.value(code); }
  __device__ Taken take(float sum) const {
    if (!sends(sum)) return {kNoCode, sum};
    const uint32_t code = scale.code(sum);
    return {code, __fsub_rn(sum, value(code))};
  }
  __device__ PayloadHeader header(int64_t numel, int64_t capacity, uint64_t kept, bool non_finite,
                                  bool damage) const {
    return e3m0_header(numel, capacity, scale, kept, non_finite, damage);
  }
};

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
