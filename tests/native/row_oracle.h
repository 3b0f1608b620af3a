#pragma once

// Reference implementation of quantized rows, in integers and doubles.

#include <algorithm>
#include <cmath>
#include <vector>

#include "../../csrc/common/row_layout.h"
#include "support.h"

namespace dct::test {

inline double largest(const double* x, int64_t width) {
  double top = 0;
  for (int64_t i = 0; i < width; ++i) {
    top = std::isfinite(x[i]) ? std::max(top, std::fabs(x[i])) : HUGE_VAL;
    if (std::isinf(top)) break;
  }
  return top;
}

inline float as_float(double x) { return from_bits(encode<float>(x)); }

// Rounds to a finite bfloat16. Subnormal results become 0.
inline uint32_t scale_bits(float x) {
  const uint32_t u = encode<BFloat16>(x, true);
  return u < 0x80 ? 0 : u;
}

// The mean of the magnitudes above `bound`, in units of `unit`, rounded like a float32 division.
inline float mean_above(const double* x, int64_t width, double unit, double bound) {
  int64_t total = 0, kept = 0;
  for (int64_t i = 0; i < width; ++i) {
    const double units = std::fabs(x[i]) / unit;  // exact: a power of two
    if (!(units > bound)) continue;
    total += static_cast<int64_t>(units);
    ++kept;
  }
  return as_float(static_cast<double>(as_float(static_cast<double>(total))) /
                  std::max<int64_t>(kept, 1));
}

// Computes the codes of a row, and returns the bits of its scale.
inline uint32_t expected_codes(const double* x, int64_t width, RowFormat format,
                               std::vector<int>& codes) {
  codes.assign(width, 0);
  const double top = largest(x, width);
  if (std::isinf(top)) return 0x7fc0;
  const int exponent = top == 0 ? -105 : std::max(std::ilogb(top), -105);
  const double unit = std::ldexp(1.0, exponent - 21);
  float exact, bound = -1.0f;
  if (format == RowFormat::kInt8 || format == RowFormat::kInt4) {
    exact = as_float(top / (format == RowFormat::kInt8 ? 127 : 7));
  } else {
    if (format == RowFormat::kTernary) bound = as_float(0.75 * mean_above(x, width, unit, -1));
    exact = as_float(mean_above(x, width, unit, bound) * unit);
  }
  const uint32_t scale = scale_bits(exact);
  if (scale == 0) return 0;
  const float inverse = as_float(1.0 / decode<BFloat16>(scale));
  for (int64_t i = 0; i < width; ++i) {
    if (format == RowFormat::kSign) {
      codes[i] = x[i] < 0 ? -1 : 1;
    } else if (format == RowFormat::kTernary) {
      codes[i] = std::fabs(x[i]) / unit > bound ? (x[i] > 0) - (x[i] < 0) : 0;
    } else {
      codes[i] = static_cast<int>(std::nearbyint(as_float(x[i] * inverse)));
    }
  }
  return scale;
}

inline std::vector<uint8_t> packed(const std::vector<int>& codes, uint32_t scale,
                                   RowFormat format) {
  const int each = codes_per_byte(format);
  std::vector<uint8_t> row;
  for (size_t begin = 0; begin < codes.size(); begin += each) {
    int byte = 0, place = 1;
    for (int k = 0; k < each && begin + k < codes.size(); ++k) {
      const int code = codes[begin + k];
      byte += place * (format == RowFormat::kSign   ? code < 0
                       : format == RowFormat::kInt4 ? code & 15
                                                    : code);
      place *= format == RowFormat::kInt4 ? 16 : format == RowFormat::kTernary ? 3 : 2;
    }
    row.push_back(static_cast<uint8_t>(byte));
  }
  row.push_back(static_cast<uint8_t>(scale));
  row.push_back(static_cast<uint8_t>(scale >> 8));
  return row;
}

// The code of column `c` in a row with arbitrary bytes.
inline int code_at(const uint8_t* row, int64_t c, RowFormat format) {
  const int each = codes_per_byte(format), k = static_cast<int>(c % each), byte = row[c / each];
  if (format == RowFormat::kInt8) return static_cast<int8_t>(byte);
  if (format == RowFormat::kInt4) return (byte >> 4 * k & 15) - (byte >> 4 * k & 8) * 2;
  if (format == RowFormat::kSign) return byte >> k & 1 ? -1 : 1;
  int number = static_cast<int8_t>(byte);
  if (number < -121 || number > 121) number = 121;
  constexpr int kPowers[] = {1, 3, 9, 27, 81};
  return (number + 121) / kPowers[k] % 3 - 1;
}

}  // namespace dct::test
