#pragma once

// The k largest of an array of keys (see magnitude_key), by bisection of the key's value: a step is
// one vector loop that counts, and no key moves. Call it inside
// vectorise_keys().

#include <cstdint>

#include "../common/rounding.h"
#include "key_vectors.h"

namespace dct::cpu {

// Key arrays are filled up to whole groups with kNoKey, so that the loops over them have no tails.
constexpr int32_t kNoKey = -1;

constexpr int64_t key_groups(int64_t n) { return (n + kKeyGroup - 1) / kKeyGroup; }
constexpr int64_t padded_keys(int64_t n) { return key_groups(n) * kKeyGroup; }

// The keys that are at least `bound`, and how many they are.
struct Largest {
  int32_t bound;
  int64_t count;
};

// The k largest of n keys, 1 <= k <= n. If there are more than k, the bound is the k-th key itself,
// and the surplus ties with it. `near` is where the bound may be, such as that of a similar row; it
// decides about time alone.
template <typename Keys>
Largest largest(Keys, const int32_t* keys, int64_t n, int64_t k, int32_t near) {
  constexpr int32_t kNear = 1 << 21;  // a quarter of a power of two
  const int64_t groups = key_groups(n);
  Largest found = {0, n};  // always count(>= found.bound) = found.count >= k > count(>= high)
  int32_t high = kFloat32Infinity + 1;
  // Without a branch that follows no pattern. A bound that leaves nothing to find does no harm.
  const auto narrow = [&](int32_t bound) {
    const int64_t count = Keys::count(keys, groups, bound);
    const bool enough = count >= k;
    found.bound = enough ? bound : found.bound;
    found.count = enough ? count : found.count;
    high = enough ? high : bound;
  };
  if (near > kNear && near < high - kNear) {
    narrow(near + kNear);
    if (high == near + kNear) narrow(near - kNear);
  }
  if (found.bound == 0 || high > near + kNear) {
    // The k-th is mostly within a few powers of two of the top (2^23 each): look there first, then
    // further down in growing steps.
    int32_t top = 0;
    for (int64_t i = 0; i < padded_keys(n); ++i) top = keys[i] > top ? keys[i] : top;
    high = top < high ? top + 1 : high;
    for (int64_t step = int64_t{1} << 24; found.bound == 0 && step < high; step *= 4) {
      narrow(high - static_cast<int32_t>(step));
    }
    // What a ReLU leaves is mostly zeros.
    if (found.bound == 0 && Keys::count(keys, groups, 1) < k) return found;
  }
  constexpr int kRounds = 4;  // to a branch: whether a round is the last follows no pattern
  while (found.count > k && high - found.bound > 1) {
    for (int round = 0; round < kRounds; ++round) narrow(found.bound + (high - found.bound) / 2);
  }
  return found;
}

// The k-th largest of n keys.
template <typename Keys>
int32_t kth_largest(Keys how, const int32_t* keys, int64_t n, int64_t k) {
  const int32_t bound = largest(how, keys, n, k, 0).bound;
  int32_t smallest = INT32_MAX;
  for (int64_t i = 0; i < padded_keys(n); ++i) {
    const int32_t key = keys[i] >= bound ? keys[i] : INT32_MAX;
    smallest = key < smallest ? key : smallest;
  }
  return smallest;
}

}  // namespace dct::cpu
