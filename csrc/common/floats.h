#pragma once

// The floating-point types of elements, and conversions between them. Backends treat NaNs and
// subnormals differently in hardware casts. So the conversions use integer arithmetic and float
// additions, which are bit-exact. They have no branches, so loops over them vectorize.

#include <cstdint>
#include <cstring>

// The host compiler and nvcc both compile the shared headers. Only nvcc accepts the two attributes.
#if defined(__CUDACC__) || defined(__HIPCC__)
#define DCT_HOST_DEVICE __host__ __device__
#else
#define DCT_HOST_DEVICE
#endif

#if defined(__BYTE_ORDER__)
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the payload is little-endian");
#endif

namespace dct {

// 0 and 1 are also the codes of the value dtype in a payload header.
enum class DType : uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

DCT_HOST_DEVICE constexpr int64_t itemsize(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Calls `function` with a value of the C++ type of `dtype`, to make it a template argument.
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

// As dispatch, for the values in a payload, which are float32 or bfloat16.
template <typename Function>
decltype(auto) dispatch_payload_value(DType dtype, Function&& function) {
  return dtype == DType::kBFloat16 ? function(BFloat16{}) : function(float{});
}

constexpr uint32_t kFloat32Nan = 0x7fc00000;  // kernels write no other NaN
constexpr uint32_t kFloat32Infinity = 0x7f800000;

DCT_HOST_DEVICE inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

DCT_HOST_DEVICE inline float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

DCT_HOST_DEVICE inline bool is_finite(float x) {
  return (float_to_bits(x) & kFloat32Infinity) != kFloat32Infinity;
}

// The value of a residual whose sum with the gradient is not finite.
DCT_HOST_DEVICE inline float finite_or_zero(float old) { return is_finite(old) ? old : 0.0f; }

// A key that orders float32 values by magnitude, with NaN above infinity. So NaN and infinity reach
// every bound that is at most infinity.
DCT_HOST_DEVICE inline int32_t magnitude_bits(float x) { return float_to_bits(x) & 0x7fffffff; }

// As magnitude_bits, but NaN ranks as infinity.
DCT_HOST_DEVICE inline int32_t magnitude_key(float x) {
  constexpr int32_t infinity = kFloat32Infinity;
  return magnitude_bits(x) < infinity ? magnitude_bits(x) : infinity;
}

DCT_HOST_DEVICE inline float to_float(float x) { return x; }

DCT_HOST_DEVICE inline float to_float(BFloat16 x) { return bits_to_float(uint32_t{x.bits} << 16); }

DCT_HOST_DEVICE inline float to_float(Float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const uint32_t shifted = (x.bits & 0x7fffu) << 13;  // exponent and mantissa of a float32
  const uint32_t exponent = shifted & 0x0f800000u;
  const uint32_t normal = shifted + (112u << 23);  // 112 = 127 - 15, the difference of the biases
  const uint32_t special = shifted + (224u << 23);
  // A subnormal is mantissa * 2^-24. The mantissa becomes the low bits of a float in [2^-14,
  // 2^-13); subtracting 2^-14 leaves the value.
  const float subnormal = bits_to_float(shifted + (113u << 23)) - bits_to_float(113u << 23);
  const uint32_t finite = exponent == 0 ? float_to_bits(subnormal) : normal;
  return bits_to_float(sign | (exponent == 0x0f800000u ? special : finite));
}

// Rounds to nearest even. Too large values become infinity, NaNs become the positive quiet NaN.
template <typename T>
DCT_HOST_DEVICE T round_to(float x);

template <>
DCT_HOST_DEVICE inline float round_to<float>(float x) {
  return bits_to_float(x != x ? kFloat32Nan : float_to_bits(x));
}

template <>
DCT_HOST_DEVICE inline BFloat16 round_to<BFloat16>(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(x != x ? kFloat32Nan >> 16 : rounded)};
}

template <>
DCT_HOST_DEVICE inline Float16 round_to<Float16>(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14, float16 values are 2^-24 apart, as are float32 values in [0.5, 1). So adding 0.5
  // rounds to a multiple of 2^-24.
  const uint32_t subnormal = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t rounded = magnitude < 0x38800000u ? subnormal : normal;
  rounded = magnitude >= 0x477ff000u ? 0x7c00u : rounded;  // 65520 and above: infinity
  return {static_cast<uint16_t>(x != x ? 0x7e00u : sign | rounded)};
}

// As round_to, but a finite x saturates at the largest finite value.
template <typename T>
DCT_HOST_DEVICE T round_saturating(float x);

template <>
DCT_HOST_DEVICE inline float round_saturating<float>(float x) {
  return round_to<float>(x);
}

template <>
DCT_HOST_DEVICE inline BFloat16 round_saturating<BFloat16>(float x) {
  const uint16_t rounded = round_to<BFloat16>(x).bits;
  const bool overflowed = (rounded & 0x7fff) == 0x7f80 && is_finite(x);
  return {static_cast<uint16_t>(rounded - overflowed)};
}

}  // namespace dct
