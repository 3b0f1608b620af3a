// support.h -- what the native tests share: random arguments, guarded memory, and float formats
// written down a second time, so that a mistake in csrc/common does not hide here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "common/ops.h"
#include "emulator/emulator.h"

namespace test {

using dct::DType;

inline int failures = 0;

inline void expect(bool ok, const char* what, int64_t index = -1) {
  if (ok || ++failures > 20) return;
  std::fprintf(stderr, "FAILED: %s at %lld\n", what, static_cast<long long>(index));
}

// The first place where two arrays differ in bits.
template <typename T>
void expect_equal(const std::vector<T>& actual, const std::vector<T>& expected, const char* what) {
  expect(actual.size() == expected.size(), what);
  for (size_t i = 0; i < expected.size() && i < actual.size(); ++i) {
    if (std::memcmp(&actual[i], &expected[i], sizeof(T)) == 0) continue;
    expect(false, what, static_cast<int64_t>(i));
    return;
  }
}

struct Random {
  std::mt19937 generator;
  explicit Random(uint32_t seed) : generator(seed) {}

  int64_t below(int64_t bound) { return static_cast<int64_t>(generator() % bound); }
  bool chance(double p) { return generator() < p * 4294967296.0; }
  template <typename T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }
  // Few magnitudes, so that there are ties, with some of the values that break kernels.
  float value(bool hard) {
    if (hard && chance(0.02)) {
      return pick(
          {NAN, -NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-45f, -3e-39f, 3.4e38f, 65520.0f});
    }
    const float x = std::normal_distribution<float>()(generator);
    return chance(0.5) ? x : std::round(x * 4.0f) / 4.0f;
  }
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Formats of 16 bits, by their definition: sign, exponent, mantissa.
inline float widen(uint32_t bits, DType dtype) {
  if (dtype == DType::kFloat32) return from_bits(bits);
  const int mantissa_bits = dtype == DType::kBFloat16 ? 7 : 10, exponent_bits = 15 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  double x = std::ldexp(mantissa + (exponent > 0 ? 1 << mantissa_bits : 0),
                        (exponent > 0 ? exponent : 1) - bias - mantissa_bits);
  if (exponent == (1 << exponent_bits) - 1) x = mantissa != 0 ? NAN : INFINITY;
  return static_cast<float>(bits & 0x8000 ? -x : x);
}

// To the nearest, by trying neighbours: the even one of two that are as near.
inline uint32_t narrow(float x, DType dtype, bool saturate = false) {
  if (std::isnan(x)) {
    return dtype == DType::kFloat32 ? 0x7fc00000 : dtype == DType::kBFloat16 ? 0x7fc0 : 0x7e00;
  }
  if (dtype == DType::kFloat32) return bits_of(x);
  const uint32_t infinity = dtype == DType::kBFloat16 ? 0x7f80 : 0x7c00;
  const double target = std::fabs(x);
  uint32_t low = 0, high = infinity;  // widen(low) <= target < the value of high
  if (std::isinf(x)) low = infinity;
  while (low < infinity && high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (widen(middle, dtype) <= target ? low : high) = middle;
  }
  if (low < infinity) {
    const double below = widen(low, dtype);
    const double above = high == infinity ? 2 * below - widen(low - 1, dtype) : widen(high, dtype);
    const double to_low = target - below, to_high = above - target;
    if (to_high < to_low || (to_high == to_low && low % 2 != 0)) low = high;
    if (saturate && low == infinity) low = infinity - 1;
  }
  return low | (std::signbit(x) ? 0x8000 : 0);
}

// An array of any float format, at any offset from alignment, with a guard after it.
struct Floats {
  DType dtype;
  int64_t size, offset;
  std::vector<uint8_t> bytes;

  Floats(DType dtype, int64_t size, int64_t offset)
      : dtype(dtype), size(size), offset(offset), bytes((size + offset) * itemsize() + 16, 0xa5) {}

  int64_t itemsize() const { return dtype == DType::kFloat32 ? 4 : 2; }
  uint8_t* data() { return bytes.data() + offset * itemsize(); }
  void set_bits(int64_t i, uint32_t bits) {
    std::memcpy(data() + i * itemsize(), &bits, itemsize());
  }
  void set(int64_t i, float x) { set_bits(i, narrow(x, dtype)); }
  uint32_t bits(int64_t i) const {
    uint32_t bits = 0;
    std::memcpy(&bits, bytes.data() + (offset + i) * itemsize(), itemsize());
    return bits;
  }
  float operator[](int64_t i) const { return widen(bits(i), dtype); }

  static Floats random(Random& random, DType dtype, int64_t size, bool hard) {
    Floats result(dtype, size, random.pick({0, 0, 1, 3}));
    for (int64_t i = 0; i < size; ++i) result.set(i, random.value(hard));
    return result;
  }
};

// Garbage of exactly this size, so that a stray access or a missing clear is found.
struct Scratch {
  std::vector<uint64_t> words;
  explicit Scratch(int64_t bytes) : words((bytes + 7) / 8, 0xabababababababab) {}
  void* data() { return words.data(); }
};

inline std::vector<int64_t> segments(Random& random, int64_t numel, int64_t count) {
  std::vector<int64_t> offsets = {0, numel};
  while (static_cast<int64_t>(offsets.size()) <= count) offsets.push_back(random.below(numel + 1));
  std::sort(offsets.begin(), offsets.end());
  return offsets;
}

// Offsets that are no segments at all.
inline std::vector<int64_t> garbage(Random& random, int64_t numel, int64_t count) {
  std::vector<int64_t> offsets(count + 1);
  for (int64_t& offset : offsets) {
    offset = random.pick<int64_t>({INT64_MIN, -1, 0, random.below(numel + 1), numel, INT64_MAX});
  }
  return offsets;
}

// Runs `test` for `cases` cases of every seed on the command line; each case has a schedule of its
// own.
inline int run(int argc, char** argv, int cases, const std::function<void(Random&)>& test) {
  for (int arg = 1; arg < argc; ++arg) {
    for (int i = 0; i < cases && failures == 0; ++i) {
      const uint32_t seed = static_cast<uint32_t>(std::atoi(argv[arg])) * 1000 + i;
      Random random(seed);
      emulator::options() = {static_cast<int>(2 + random.below(3)), i == 0 ? 0 : seed + 1};
      test(random);
      if (failures > 0) std::fprintf(stderr, "seed %s, case %d\n", argv[arg], i);
    }
  }
  return failures > 0;
}

}  // namespace test
