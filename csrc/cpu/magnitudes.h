#pragma once

// Scales are computed from the largest magnitude of a row, and from sums of magnitudes that do not
// depend on the order.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../common/row_layout.h"

namespace dct::cpu {

inline int32_t largest_key(const float* x, int64_t width) {
  int32_t top = 0;
  for (int64_t i = 0; i < width; ++i) {
    const int32_t magnitude = magnitude_bits(x[i]);
    top = magnitude > top ? magnitude : top;
  }
  return top;
}

// The sum of the magnitudes, in units.
inline int64_t sum_magnitudes(const float* x, int64_t width, float inverse_unit) {
  int64_t total = 0;
  for (int64_t begin = 0; begin < width; begin += kUnitsInWord) {
    const int64_t n = std::min(width - begin, kUnitsInWord);
    uint32_t units = 0;
    for (int64_t i = 0; i < n; ++i) {
      units += whole_units(std::fabs(x[begin + i]) * inverse_unit);
    }
    total += units;
  }
  return total;
}

inline float mean(int64_t total, int64_t count) {
  return static_cast<float>(total) / static_cast<float>(count);
}

}  // namespace dct::cpu
