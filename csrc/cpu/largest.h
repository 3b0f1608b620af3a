#pragma once

// The k largest of an array of keys (see magnitude_key), by bisection of the key's value: a step is
// one vector loop that counts, and no key moves. Call it inside vectorise().

#include <cstdint>

namespace dct::cpu {

// Key arrays are filled up to whole groups with kNoKey, so that the loops over them have no tails.
constexpr int64_t kKeyGroup = 64;
constexpr int32_t kNoKey = -1;

constexpr int64_t padded_keys(int64_t n) { return (n + kKeyGroup - 1) / kKeyGroup * kKeyGroup; }

inline int64_t count_at_least(const int32_t* keys, int64_t n, int32_t bound) {
  constexpr int64_t kPart = int64_t{1} << 30;
  int64_t total = 0;
  for (int64_t begin = 0; begin < n; begin += kPart) {
    const int64_t end = padded_keys(n - begin < kPart ? n - begin : kPart);
    int32_t count = 0;  // as wide as the keys, so that vector lanes line up
    for (int64_t i = 0; i < end; ++i) count += keys[begin + i] >= bound;
    total += count;
  }
  return total;
}

// The keys that are at least `bound`, and how many they are.
struct Largest {
  int32_t bound;
  int64_t count;
};

// The k largest of n keys, 1 <= k <= n. If there are more than k, the bound is the k-th key itself,
// and the surplus ties with it.
inline Largest largest(const int32_t* keys, int64_t n, int64_t k) {
  int32_t top = 0;
  for (int64_t i = 0; i < padded_keys(n); ++i) top = keys[i] > top ? keys[i] : top;

  Largest found = {0, n};  // always count(>= found.bound) = found.count >= k > count(>= high)
  int32_t high = top + 1;
  // The k-th is mostly within a few powers of two of the top (2^23 each): look there first, then
  // further down in growing steps.
  for (int64_t step = int64_t{1} << 24; found.bound == 0 && step < high; step *= 4) {
    const int32_t bound = high - static_cast<int32_t>(step);
    const int64_t count = count_at_least(keys, n, bound);
    if (count >= k) {
      found = {bound, count};
    } else {
      high = bound;
    }
  }
  // What a ReLU leaves is mostly zeros.
  if (found.bound == 0 && count_at_least(keys, n, 1) < k) return found;
  while (found.count > k && high - found.bound > 1) {
    const int32_t middle = found.bound + (high - found.bound) / 2;
    const int64_t count = count_at_least(keys, n, middle);
    if (count >= k) {
      found = {middle, count};
    } else {
      high = middle;
    }
  }
  return found;
}

// The k-th largest of n keys.
inline int32_t kth_largest(const int32_t* keys, int64_t n, int64_t k) {
  const int32_t bound = largest(keys, n, k).bound;
  int32_t smallest = INT32_MAX;
  for (int64_t i = 0; i < padded_keys(n); ++i) {
    const int32_t key = keys[i] >= bound ? keys[i] : INT32_MAX;
    smallest = key < smallest ? key : smallest;
  }
  return smallest;
}

}  // namespace dct::cpu
