#pragma once

// Rows in the baseline format: OCP Microscaling (MX) specification 1.0, MXFP4. Values are E2M1, the
// scale of 32 of them is a power of two, E8M0. Call it inside vectorise().

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../common/row_formats.h"

namespace dct::cpu {

constexpr int32_t kMxfp4NanScale = 255;

// Codes, one a byte, of up to 32 columns; returns their scale.
inline uint8_t mxfp4_block(const float* x, int64_t n, uint8_t* codes) {
  int32_t top = 0;
  for (int64_t i = 0; i < n; ++i) top = std::max(top, magnitude_key(x[i]));
  // 2^(floor(log2(largest)) - 2), so that the largest is in [4, 8), if the exponent has 8 bits.
  const int32_t scale = std::max((top >> 23) - 2, 0);
  const float inverse = bits_to_float(static_cast<uint32_t>(254 - scale) << 23);
  const bool finite = top < static_cast<int32_t>(kFloat32Infinity);
  for (int64_t i = 0; i < n; ++i) {
    const float magnitude = std::fabs(x[i]) * inverse;
    // How many of the midpoints between E2M1's values are passed; ties go to the even code.
    const int32_t code = (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) +
                         (magnitude >= 1.75f) + (magnitude > 2.5f) + (magnitude >= 3.5f) +
                         (magnitude > 5.0f);
    const int32_t sign = static_cast<int32_t>(float_to_bits(x[i]) >> 28) & 8;
    codes[i] = static_cast<uint8_t>(finite ? code | sign : 0);
  }
  return static_cast<uint8_t>(finite ? scale : kMxfp4NanScale);
}

inline void quantize_mxfp4(const float* x, int64_t width, uint8_t* row) {
  uint8_t* scales = row + code_bytes(width, RowFormat::kMxfp4);
  for (int64_t begin = 0; begin < width; begin += kMxfp4Block) {
    uint8_t codes[kMxfp4Block] = {};
    const int64_t n = std::min(width - begin, kMxfp4Block);
    *scales++ = mxfp4_block(x + begin, n, codes);
    for (int64_t i = 0; i < n; i += 2) *row++ = static_cast<uint8_t>(codes[i] | codes[i + 1] << 4);
  }
}

// The n entries from column `begin` on, the first of a block.
template <typename Out>
void dequantize_mxfp4(const uint8_t* row, int64_t width, int64_t begin, int64_t n, Out* out) {
  static constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  const uint8_t* codes = row + begin / 2;
  const uint8_t* scales = row + code_bytes(width, RowFormat::kMxfp4) + begin / kMxfp4Block;
  for (int64_t block = 0; block < n; block += kMxfp4Block) {
    const uint32_t scale = *scales++;
    const uint32_t power = scale == 0 ? 1u << 22 : scale << 23;  // 2^-127 is subnormal
    const float factor = bits_to_float(scale == kMxfp4NanScale ? kFloat32Nan : power);
    const int64_t end = std::min(n, block + kMxfp4Block);
    for (int64_t i = block; i < end; ++i) {
      out[i] = round_to<Out>(kE2m1[codes[i / 2] >> (i % 2 * 4) & 15] * factor);
    }
  }
}

}  // namespace dct::cpu
