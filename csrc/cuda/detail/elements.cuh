#pragma once

// Accumulation of a gradient of any dtype, and conversion of sums to payload values.

#include "../../common/dtype.h"
#include "../../common/payload.h"
#include "../../common/rounding.h"
#include "device.cuh"

namespace dct::cuda {

// A scale that is one element in device memory, or null for 1.
__device__ inline float load_scale(const float* scale) { return scale != nullptr ? *scale : 1.0f; }

// residual + grad * scale; product and sum are rounded separately, never fused.
template <typename Grad>
__device__ float accumulate(float residual, Grad grad, float scale) {
  return __fadd_rn(residual, __fmul_rn(to_float(grad), scale));
}

// Calls visit(i, sum, inside) for 0 <= i < length, one element per lane, of any alignment. Lanes
// past the end call it with inside = false. Several loads are in flight. By one warp.
template <typename Grad, typename Visit>
__device__ void for_each_sum(const float* residual, const Grad* grad, float scale, int length,
                             Visit visit) {
  constexpr int kInFlight = 8;
  for (int first = lane_index(); first - lane_index() < length; first += kInFlight * kWarpSize) {
    float old[kInFlight] = {};
    Grad gradient[kInFlight] = {};
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      if (first + a * kWarpSize >= length) continue;
      old[a] = residual[first + a * kWarpSize];
      gradient[a] = grad[first + a * kWarpSize];
    }
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      const int i = first + a * kWarpSize;
      visit(i, accumulate(old[a], gradient[a], scale), i < length);
    }
  }
}

// What the residual keeps where the sum is not finite.
__device__ inline float finite_or_zero(float old) { return is_finite(old) ? old : 0.0f; }

// A sum, split into a payload value (in the low bits) and the remainder for the residual, so that
// value + remainder == sum. This is exact: the remainder of float32 is 0, and that of bfloat16 has
// at most 16 significant bits, also where the value saturates or is subnormal. So `restore`
// recovers every bit.
struct Split {
  uint32_t bits;
  float remainder;
};
__device__ inline float payload_value(uint32_t bits, DType value_dtype) {
  return bits_to_float(value_dtype == DType::kBFloat16 ? bits << 16 : bits);
}
__device__ inline Split split(float sum, DType value_dtype) {
  const uint32_t bits = value_dtype == DType::kBFloat16
                            ? round_saturating<BFloat16>(sum).bits
                            : float_to_bits(round_saturating<float>(sum));
  return {bits, __fsub_rn(sum, payload_value(bits, value_dtype))};
}
__device__ inline float restore(float remainder, uint32_t bits, DType value_dtype) {
  return __fadd_rn(remainder, payload_value(bits, value_dtype));
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

// Where entries are stored: a payload's positions and values, or a part of them.
struct Entries {
  uint16_t* positions;
  uint8_t* values;
  uint32_t capacity;
  DType value_dtype;

  __device__ void put(uint32_t entry, int64_t element, uint32_t bits) const {
    positions[entry] = static_cast<uint16_t>(element & (kBlock - 1));
    store_value(values, entry, bits, value_dtype);
  }
  // Without the first entries.
  __device__ Entries after(Word entries) const {
    const auto skipped = static_cast<uint32_t>(min(entries, Word{capacity}));
    return {positions + skipped, values + skipped * itemsize(value_dtype), capacity - skipped,
            value_dtype};
  }
};

}  // namespace dct::cuda
