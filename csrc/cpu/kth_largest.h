#pragma once

#include <cstdint>

namespace dct::cpu {

inline int64_t count_at_least(const int32_t* keys, int64_t n, int32_t bound) {
  constexpr int64_t kPart = int64_t{1} << 30;
  int64_t total = 0;
  for (int64_t begin = 0; begin < n; begin += kPart) {
    const int64_t end = n - begin < kPart ? n : begin + kPart;
    int32_t count = 0;  // as wide as the keys, so that vector lanes line up
    for (int64_t i = begin; i < end; ++i) count += keys[i] >= bound;
    total += count;
  }
  return total;
}

// The k-th largest of n non-negative keys, 1 <= k <= n, by bisection of the key's value: a
// step is one vector loop that counts, and no key moves. Call it inside vectorise().
inline int32_t kth_largest(const int32_t* keys, int64_t n, int64_t k) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = keys[i] > largest ? keys[i] : largest;

  // Always: count(>= low) >= k > count(>= high).
  int32_t low = 0, high = largest + 1;
  // The k-th is mostly within a few powers of two of the largest (2^23 each): look there first,
  // then further down in growing steps.
  for (int64_t step = int64_t{1} << 24; low == 0 && step < high; step *= 4) {
    const int32_t bound = high - static_cast<int32_t>(step);
    (count_at_least(keys, n, bound) >= k ? low : high) = bound;
  }
  // What a ReLU leaves is mostly zeros.
  if (low == 0 && count_at_least(keys, n, 1) < k) return 0;
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    const int64_t count = count_at_least(keys, n, middle);
    if (count == k) {  // the smallest of these is it
      int32_t smallest = high;
      for (int64_t i = 0; i < n; ++i) {
        const int32_t key = keys[i] >= middle ? keys[i] : high;
        smallest = key < smallest ? key : smallest;
      }
      return smallest;
    }
    (count > k ? low : high) = middle;
  }
  return low;
}

}  // namespace dct::cpu
