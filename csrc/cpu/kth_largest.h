#pragma once

// The k-th largest of an array of keys (see magnitude_key), bit by bit from the highest: whether
// at least k keys reach a bound is one vector loop that counts. Call it inside vectorize().

#include <algorithm>
#include <cstdint>

namespace dct::cpu {

// n below 2^31, so that the count is as wide as the keys.
inline int32_t count_keys(const int32_t* keys, int64_t n, int32_t bound) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += keys[i] >= bound;
  return count;
}

// Moves the keys >= bound to the front and returns their number.
inline int64_t keep_keys(int32_t* keys, int64_t n, int32_t bound) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t key = keys[i];
    keys[count] = key;
    count += key >= bound;
  }
  return count;
}

// The k-th largest of n keys, 1 <= k <= n. Discards other keys.
inline int32_t kth_largest(int32_t* keys, int64_t n, int64_t k) {
  int32_t bound = 0;
  int64_t found = n;  // keys >= bound, always k or more
  for (int32_t bit = 1 << 30; bit != 0 && found > k; bit >>= 1) {
    const int64_t count = count_keys(keys, n, bound | bit);
    if (count < k) continue;
    bound |= bit;
    found = count;
    if (found <= n / 2) n = keep_keys(keys, n, bound);
  }
  int32_t smallest = INT32_MAX;
  for (int64_t i = 0; i < n; ++i) {
    smallest = std::min(smallest, keys[i] >= bound ? keys[i] : INT32_MAX);
  }
  return smallest;
}

}  // namespace dct::cpu
