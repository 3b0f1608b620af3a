#pragma once

// The k-th largest of an array of keys (see magnitude_key), by bisection of the key's value: a step
// is one vector loop that counts. Call it inside vectorize_keys().

#include <cstdint>

#include "../common/rounding.h"
#include "key_simd.h"

namespace dct::cpu {

// Key arrays are padded to whole groups with kNoKey, so that loops over them have no tails.
constexpr int32_t kNoKey = -1;

constexpr int64_t key_groups(int64_t n) { return (n + kKeyGroup - 1) / kKeyGroup; }
constexpr int64_t padded_keys(int64_t n) { return key_groups(n) * kKeyGroup; }

// The k-th largest of n keys, 1 <= k <= n. Other keys may be discarded.
template <typename Keys>
int32_t kth_largest(Keys, int32_t* keys, int64_t n, int64_t k) {
  int64_t groups = key_groups(n);
  // Always count(>= bound) = found >= k > count(>= high).
  int32_t bound = 0, high = kFloat32Infinity + 1;
  int64_t found = n;
  // Without a branch that follows no pattern. A bound that leaves nothing to find does no harm.
  const auto narrow = [&](int32_t middle) {
    const int64_t count = Keys::count(keys, groups, middle);
    const bool enough = count >= k;
    bound = enough ? middle : bound;
    found = enough ? count : found;
    high = enough ? high : middle;
  };
  // The k-th is mostly within a few powers of two of the top (2^23 each): look there first, then
  // further down in growing steps.
  int32_t top = 0;
  for (int64_t i = 0; i < padded_keys(n); ++i) top = keys[i] > top ? keys[i] : top;
  high = top < high ? top + 1 : high;
  for (int64_t step = int64_t{1} << 24; bound == 0 && step < high; step *= 4) {
    narrow(high - static_cast<int32_t>(step));
  }
  // The output of a ReLU is mostly zeros.
  if (bound == 0 && Keys::count(keys, groups, 1) < k) return 0;
  constexpr int kRounds = 4;  // to a branch: whether a round is the last follows no pattern
  while (found > k && high - bound > 1) {
    if (found <= n / 2) {
      n = Keys::keep(keys, groups, bound);
      groups = key_groups(n);
      for (int64_t i = n; i < kKeyGroup * groups; ++i) keys[i] = kNoKey;
    }
    for (int round = 0; round < kRounds; ++round) narrow(bound + (high - bound) / 2);
  }
  int32_t smallest = INT32_MAX;
  for (int64_t i = 0; i < padded_keys(n); ++i) {
    const int32_t key = keys[i] >= bound ? keys[i] : INT32_MAX;
    smallest = key < smallest ? key : smallest;
  }
  return smallest;
}

}  // namespace dct::cpu
