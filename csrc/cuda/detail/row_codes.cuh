#pragma once

// Quantized rows: the scale of a row, the code of an entry, and packing of codes into bytes.
// Integer codes are bytes in two's complement. A sign is 1 if negative.

#include "../../common/row_layout.h"
#include "device.cuh"

namespace dct::cuda {

constexpr float kUnit = 8388608.0f;  // 2^23: the floats from here to 2^24 are exactly the integers

constexpr float kNeverOverflows = 0x1p120f;  // a code times a smaller scale is finite

// Returns 2^23 plus a byte of a word. A byte permutation has one constant operand, which should
// be the selector. The shuffle hides the exponent from the compiler, which would otherwise make the
// exponent the constant operand and load each selector with an instruction.
struct UnitFloats {
  uint32_t exponent = __shfl_sync(kFullWarp, 0x4b000000u, 0);
  __device__ float operator()(uint32_t byte, uint32_t word) const {
    return bits_to_float(__byte_perm(word, exponent, 0x7650 + byte));
  }
};

template <typename Total>
__device__ float mean_of(Total total, Total count) {
  return __fdiv_rn(static_cast<float>(total), static_cast<float>(count > 0 ? count : 1));
}

// The bits of 2^23, plus whole_units() of a magnitude below 2^22, computed by a truncating
// addition. Conversions to integers have a quarter of the throughput of additions.
constexpr uint32_t kUnitBitsOfZero = 0x4b000000;
__device__ inline uint32_t unit_bits(float magnitude) {
  return float_to_bits(__fadd_rz(magnitude, kUnit));
}

// The quantization parameters of one row.
struct RowQuantizer {
  float factor;  // an entry is multiplied by this, then rounded or compared
  BFloat16 scale;
  bool usable;  // if not, all codes are 0

  // `mean` is the mean of the kept magnitudes, in units. Only ternary and sign use it.
  __device__ RowQuantizer(RowFormat format, int top, float mean) {
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
    return float_to_bits(__fadd_rn(__fmul_rn(x, factor), kRoundToInteger)) & 255;
  }
};

// Bytes [at, at + 4) of words, for any `at`. Reads two words.
__device__ inline uint32_t four_bytes(const uint32_t* words, unsigned at) {
  return __byte_perm(words[at / 4], words[at / 4 + 1], 0x3210 + at % 4 * 0x1111);
}

// Loads the codes of columns [column, column + N) of a row that begins at byte `row`. N is 4 or 8
// and divides `column`.
template <RowFormat kFormat, int N>
__device__ void load_codes(const uint32_t* words, unsigned row, unsigned column,
                           const UnitFloats& unit_float, float (&codes)[N]) {
  if constexpr (kFormat == RowFormat::kInt4) {
    const uint32_t offset = four_bytes(words, row + column / 2) ^ 0x88888888;  // codes + 8
    const uint32_t low = offset & 0x0f0f0f0f, high = offset >> 4 & 0x0f0f0f0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      codes[i] = __fsub_rn(unit_float(i / 2, i % 2 == 0 ? low : high), kUnit + 8.0f);
    }
  } else if constexpr (kFormat == RowFormat::kSign) {
    const uint32_t byte = reinterpret_cast<const uint8_t*>(words)[row + column / 8] >> column % 8;
#pragma unroll
    for (int i = 0; i < N; ++i) codes[i] = bits_to_float(float_to_bits(1.0f) | byte >> i << 31);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const uint32_t word = four_bytes(words, row + column + i) ^ 0x80808080;  // codes + 128
#pragma unroll
      for (int b = 0; b < 4; ++b) codes[i + b] = __fsub_rn(unit_float(b, word), kUnit + 128.0f);
    }
  }
}

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
  }
  return static_cast<uint8_t>(byte);
}

}  // namespace dct::cuda
