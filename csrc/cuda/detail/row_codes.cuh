#pragma once

// Quantized rows: the scale of a row, the code of an entry, and packing of codes into bytes. Codes
// are bytes in two's complement; a sign is 1 if negative.

#include "../../common/row_layout.h"
#include "device.cuh"

namespace dct::cuda {

template <typename Total>
__device__ float mean_of(Total total, Total count) {
  return __fdiv_rn(static_cast<float>(total), static_cast<float>(count > 0 ? count : 1));
}

// Quantization parameters of one row.
struct RowQuantizer {
  float factor;  // an entry is multiplied by it, then rounded or compared
  float bound;   // ternary: magnitudes up to it become 0
  BFloat16 scale;
  bool usable;  // if not, all codes are 0

  // `mean` is that of the kept magnitudes, in units; used by ternary and sign.
  __device__ RowQuantizer(RowFormat format, int top, float mean, float bound) : bound(bound) {
    const bool finite = top < static_cast<int>(kFloat32Infinity);
    const bool integers = format == RowFormat::kInt8 || format == RowFormat::kInt4;
    const Units units = units_of(top);
    const float exact =
        integers ? __fdiv_rn(bits_to_float(top), levels(format)) : __fmul_rn(mean, units.unit);
    scale = finite ? row_scale(exact) : kNanScale;
    usable = finite && scale.bits != 0;
    factor = integers ? __fdiv_rn(1.0f, usable ? to_float(scale) : 1.0f) : units.inverse_unit;
  }

  template <RowFormat kFormat>
  __device__ uint32_t code(float x) const {
    if constexpr (kFormat == RowFormat::kSign) return x < 0.0f;
    const float scaled = __fmul_rn(x, factor);
    if constexpr (kFormat == RowFormat::kTernary) {
      return static_cast<uint32_t>((scaled > bound) - (scaled < -bound)) & 255;
    }
    return float_to_bits(__fadd_rn(scaled, kRoundToInteger)) & 255;
  }
};

// Packs the codes of one byte; code(i) returns the code of its i-th column.
template <RowFormat kFormat, typename Code>
__device__ uint8_t pack_byte(Code code) {
  uint32_t byte = 0;
#pragma unroll
  for (int i = codes_per_byte(kFormat) - 1; i >= 0; --i) {
    const uint32_t digit = code(i);
    if constexpr (kFormat == RowFormat::kInt8) byte = digit;
    if constexpr (kFormat == RowFormat::kInt4) byte = byte << 4 | (digit & 15);
    if constexpr (kFormat == RowFormat::kSign) byte = byte << 1 | digit;
    // Modulo 256, so that -1 may be 255.
    if constexpr (kFormat == RowFormat::kTernary) byte = byte * 3 + digit;
  }
  return static_cast<uint8_t>(byte);
}

// Calls store(i, code) for the i-th code of any byte.
template <RowFormat kFormat, typename Store>
__device__ void unpack_byte(uint32_t byte, Store store) {
  if constexpr (kFormat == RowFormat::kInt8) store(0, byte);
  if constexpr (kFormat == RowFormat::kTernary) {
    byte = (byte + 121) & 255;
    byte = byte < 242 ? byte : 242;
  }
#pragma unroll
  for (int i = 0; i < codes_per_byte(kFormat); ++i) {
    if constexpr (kFormat == RowFormat::kInt4) store(i, ((byte >> 4 * i & 15) ^ 8) - 8);
    if constexpr (kFormat == RowFormat::kSign) store(i, 1 - 2 * (byte >> i & 1));
    if constexpr (kFormat == RowFormat::kTernary) {
      const uint32_t quotient = byte * 171 >> 9;  // byte / 3 for any byte
      store(i, byte - 3 * quotient - 1);
      byte = quotient;
    }
  }
}

}  // namespace dct::cuda
