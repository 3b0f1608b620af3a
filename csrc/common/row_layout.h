#pragma once

// The bytes of a row in a message: the positions of its k entries, or all its entries quantized.
// docs/reference/ops.md specifies every bit.

#include <cstdint>
#include <type_traits>

#include "floats.h"

namespace dct {

// The encoding of the k positions of a row: the smallest of three. It depends only on `width` and
// `k`. The receiver has both numbers, so the message does not contain the encoding.
enum class PositionEncoding {
  kBitmap,  // ceil(width / 8) bytes, least significant bit first
  kUint8,   // k columns of one byte, width <= 256
  kUint16,  // k columns of two bytes, little-endian, width <= 65,536
};

// The smallest encoding. On a tie, the one that is first in the list above.
DCT_HOST_DEVICE constexpr PositionEncoding position_encoding(int64_t width, int64_t k) {
  const int64_t bitmap = width / 8 + (width % 8 != 0);
  if (width <= 256 && k < bitmap) return PositionEncoding::kUint8;
  if (width <= 65536 && 2 * k < bitmap) return PositionEncoding::kUint16;
  return PositionEncoding::kBitmap;
}

// Bytes of one row's positions.
DCT_HOST_DEVICE constexpr int64_t position_bytes(int64_t width, int64_t k) {
  switch (position_encoding(width, k)) {
    case PositionEncoding::kUint8:
      return k;
    case PositionEncoding::kUint16:
      return 2 * k;
    default:
      return width / 8 + (width % 8 != 0);
  }
}

// A quantized row has the codes of all columns, then one scale. kTernary is not a format of the row
// ops. It encodes the groups of 64 entries in dense payloads (quantized_payload.h).
enum class RowFormat : uint8_t { kInt8, kInt4, kSign, kTernary };

// Calls `function` with a format of the row ops as a type, to make it a template argument.
template <typename Function>
decltype(auto) dispatch(RowFormat format, Function&& function) {
  switch (format) {
    case RowFormat::kInt8:
      return function(std::integral_constant<RowFormat, RowFormat::kInt8>{});
    case RowFormat::kInt4:
      return function(std::integral_constant<RowFormat, RowFormat::kInt4>{});
    default:
      return function(std::integral_constant<RowFormat, RowFormat::kSign>{});
  }
}

constexpr int64_t kScaleBytes = 2;  // bfloat16

DCT_HOST_DEVICE constexpr int codes_per_byte(RowFormat format) {
  switch (format) {
    case RowFormat::kInt8:
      return 1;
    case RowFormat::kTernary:
      return 5;
    case RowFormat::kSign:
      return 8;
    default:
      return 2;
  }
}

constexpr int kTrits = codes_per_byte(RowFormat::kTernary);

// Bytes of the codes of one row, which precede the scale.
DCT_HOST_DEVICE constexpr int64_t code_bytes(int64_t width, RowFormat format) {
  return (width - 1) / codes_per_byte(format) + 1;
}

// Bytes of one row.
DCT_HOST_DEVICE constexpr int64_t row_bytes(int64_t width, RowFormat format) {
  return code_bytes(width, format) + kScaleBytes;
}

// The code of the largest magnitude of a row in the integer formats.
DCT_HOST_DEVICE constexpr float levels(RowFormat format) {
  return format == RowFormat::kInt8 ? 127.0f : 7.0f;
}

// Adding this constant to a float32 with a magnitude below 2^22 rounds to the nearest integer, ties
// to even. The low bits of the sum hold that integer in two's complement.
constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23

// Sums over a row add integers, so the sums do not depend on the order. An integer is a magnitude,
// divided by the row's unit and truncated. The unit is such that the largest integer of the row has
// at most 22 bits. So the sum of 2^10 integers fits 32 bits.
constexpr int kUnitBits = 22;
constexpr int64_t kUnitsInWord = 1024;

struct Units {
  float inverse_unit, unit;  // normal powers of two; their product is 1
};

DCT_HOST_DEVICE inline Units units_of(int32_t largest_key) {
  const int32_t biased = largest_key >> 23;
  const uint32_t exponent = biased < kUnitBits ? kUnitBits : biased;
  return {bits_to_float((253 + kUnitBits - exponent) << 23),
          bits_to_float((exponent - (kUnitBits - 1)) << 23)};
}

// Truncates a magnitude in units to an integer.
DCT_HOST_DEVICE inline uint32_t whole_units(float magnitude) {
  return static_cast<uint32_t>(static_cast<int32_t>(magnitude));
}

// The scale that is sent: finite, and normal or 0. `x` is not negative.
DCT_HOST_DEVICE inline BFloat16 row_scale(float x) {
  const BFloat16 scale = round_saturating<BFloat16>(x);
  return {static_cast<uint16_t>(scale.bits < 0x0080 ? 0 : scale.bits)};
}

constexpr BFloat16 kNanScale = {kFloat32Nan >> 16};  // the scale of a row with a NaN or an infinity

}  // namespace dct
