#pragma once

// The k-th largest key of sixteen rows at once, one row per lane: each step of the bisection is one
// counting loop, without divergence or horizontal sums. Call it inside vectorize_rows().

#include <cstdint>

#include "../common/floats.h"
#include "row_lanes.h"

namespace dct::cpu {

// Separate loops, because the compiler vectorizes only uniform ones.
inline Lanes least_keys(const int32_t* keys, int64_t n) {
  Lanes least;
  for (int l = 0; l < kLanes; ++l) least.at[l] = kFloat32Infinity;
  for (int64_t j = 0; j < n; ++j) {
    for (int l = 0; l < kLanes; ++l) {
      const int32_t key = keys[kLanes * j + l];
      least.at[l] = key < least.at[l] ? key : least.at[l];
    }
  }
  return least;
}

inline Lanes largest_keys(const int32_t* keys, int64_t n) {
  Lanes largest;
  for (int l = 0; l < kLanes; ++l) largest.at[l] = 0;
  for (int64_t j = 0; j < n; ++j) {
    for (int l = 0; l < kLanes; ++l) {
      const int32_t key = keys[kLanes * j + l];
      largest.at[l] = key > largest.at[l] ? key : largest.at[l];
    }
  }
  return largest;
}

// Raises each lane's bound, which at least k of its n keys reach, and at least k reach the result.
// If rounds suffice, no more do, or else the bound is the k-th key itself, or infinity if that is
// above. Keys and bounds are multiples of `unit`, a power of two. Rounds come in threes: which one
// is the last follows no pattern, and to one that found all nothing happens.
template <typename Rows>
void raise_bounds(Rows, const int32_t* keys, int64_t n, int32_t k, int32_t unit, int rounds,
                  Lanes& bound) {
  constexpr int32_t infinity = kFloat32Infinity;
  Lanes low = bound, high = largest_keys(keys, n), middle, count;  // k reach low, and not high
  for (int l = 0; l < kLanes; ++l) {
    high.at[l] = (high.at[l] < infinity ? high.at[l] : infinity) + unit;
    // First whether the bound is the k-th already: so it is where all of a row are zeros but a few.
    middle.at[l] = low.at[l] < infinity ? low.at[l] + unit : infinity;
  }
  int32_t open = 1;
  const auto halve = [&] {
    Rows::reach(keys, n, middle, count);
    open = 0;
    // Sums of masks rather than branches or nested choices: these the compiler does not make
    // vectors.
    for (int l = 0; l < kLanes; ++l) {
      const int32_t enough = -(count.at[l] >= k), exact = -(count.at[l] == k);
      low.at[l] += (middle.at[l] - low.at[l]) & enough;
      high.at[l] += (middle.at[l] - high.at[l]) & ~enough;
      high.at[l] += (low.at[l] + unit - high.at[l]) & exact;
      const int32_t range = high.at[l] - low.at[l];
      open |= -(range > unit);
      middle.at[l] = low.at[l] + (range >> 1 & -unit);
    }
  };
  for (; open != 0 && rounds > 0; rounds -= 3) {
    halve();
    halve();
    halve();
  }
  bound = low;
}

}  // namespace dct::cpu
