#pragma once

// Finds the k-th largest key of each of sixteen rows together, one row per lane. Each step of the
// bisection is one counting loop, without divergence or horizontal sums. These functions must be
// called inside vectorize_rows().

#include <cstdint>

#include "../common/floats.h"
#include "row_lanes.h"

namespace dct::cpu {

// least_keys() and largest_keys() are separate, because the compiler vectorizes only uniform loops.
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

// Raises the bound of each lane. At least k of the lane's n keys reach the old and the new bound.
// If `rounds` is large enough, either exactly k keys reach the result, or the result is the k-th
// key. A k-th key above infinity (NaN) counts as infinity. Keys and bounds are multiples of `unit`,
// a power of two. Rounds run in groups of three, because the branch predictor cannot predict the
// last round. A further round does not change a finished lane.
template <typename Rows>
void raise_bounds(Rows, const int32_t* keys, int64_t n, int32_t k, int32_t unit, int rounds,
                  Lanes& bound) {
  constexpr int32_t infinity = kFloat32Infinity;
  Lanes low = bound, high = largest_keys(keys, n), middle, count;  // >= k reach low, < k high
  for (int l = 0; l < kLanes; ++l) {
    high.at[l] = (high.at[l] < infinity ? high.at[l] : infinity) + unit;
    // The first round tests whether the bound is the k-th key already, as in a row of mostly zeros.
    middle.at[l] = low.at[l] < infinity ? low.at[l] + unit : infinity;
  }
  int32_t open = 1;
  const auto halve = [&] {
    Rows::reach(keys, n, middle, count);
    open = 0;
    // Masked additions, because the compiler does not vectorize branches or nested selects.
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
