// functors.h -- the computation of each opcode for one lane. Results are converted to the type of
// the register. Definitions: https://docs.nvidia.com/cuda/parallel-thread-execution
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace ptx {

template <typename To, typename From>
To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &x, sizeof(To));
  return result;
}

// --- Arithmetic. Integers wrap (-fwrapv). All NaN results in float32 have the same bits.

template <typename T>
T one_nan(T x) {
  if constexpr (std::is_same_v<T, float>)
    return x != x ? bits<float>(0x7fffffffu) : x;
  else
    return x;
}

inline constexpr auto add = [](auto a, auto b) { return one_nan(a + b); };
// Rounds towards zero: if the nearest float is larger in magnitude than the exact sum, returns the
// next float towards zero. The exact sum is the sum in double plus the rounding error of that sum.
inline constexpr auto add_to_zero = [](float a, float b) {
  const double sum = double{a} + b, of_b = sum - a, error = (a - (sum - of_b)) + (b - of_b);
  const auto nearest = static_cast<float>(sum);
  const double beyond = std::fabs(double{nearest}) - std::fabs(sum);
  if (beyond > 0 || (beyond == 0 && error * sum < 0)) {
    return bits<float>(bits<uint32_t>(nearest) - 1);
  }
  return one_nan(nearest);
};
inline constexpr auto subtract = [](auto a, auto b) { return one_nan(a - b); };
inline constexpr auto multiply = [](auto a, auto b) { return one_nan(a * b); };
inline constexpr auto multiply_wide = [](auto a, auto b) {
  using Wide = std::conditional_t<std::is_signed_v<decltype(a)>, int64_t, uint64_t>;
  return Wide{a} * Wide{b};
};
inline constexpr auto multiply_add = [](auto a, auto b, auto c) { return a * b + c; };
inline constexpr auto fused = [](float a, float b, float c) { return one_nan(std::fma(a, b, c)); };
inline constexpr auto divide = [](auto a, auto b) {
  using T = decltype(a);
  if constexpr (std::is_floating_point_v<T>) {
    return one_nan(a / b);
  } else {
    if (b == 0) return static_cast<T>(-1);  // unspecified; as on GPUs
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(0 - a);
    return a / b;
  }
};
// If one operand is NaN, the result is the other operand. -0.0 is less than 0.0.
template <bool kLeast, typename T>
T extreme(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    if (a != a) return one_nan(b);
    if (b != b) return a;
    if (a == b) {
      const Bits x = bits<Bits>(a), y = bits<Bits>(b);
      return bits<T>(kLeast ? x | y : x & y);
    }
  }
  return (a < b) == kLeast ? a : b;
}
inline constexpr auto least = [](auto a, auto b) { return extreme<true>(a, b); };
inline constexpr auto most = [](auto a, auto b) { return extreme<false>(a, b); };
inline constexpr auto least_above_zero = [](auto a, auto b) {
  return std::max<decltype(a)>(std::min(a, b), 0);
};

// absolute and negate change only the sign bit of a float, even for NaN.
inline constexpr auto absolute = [](float a) { return std::fabs(a); };
inline constexpr auto negate = [](auto a) { return -a; };

// --- Bits

inline constexpr auto bit_and = [](auto a, auto b) { return a & b; };
inline constexpr auto bit_or = [](auto a, auto b) { return a | b; };
inline constexpr auto bit_xor = [](auto a, auto b) { return a ^ b; };
inline constexpr auto complement = [](auto a) { return ~a; };
inline constexpr auto not_predicate = [](uint8_t a) { return a ^ 1; };
// Shift amounts above the width are clamped to the width.
inline constexpr auto shift_left = [](auto a, uint32_t n) {
  return n >= 8 * sizeof(a) ? 0 : uint64_t{a} << n;
};
inline constexpr auto shift_right = [](auto a, uint32_t n) {
  constexpr uint32_t kLast = 8 * sizeof(a) - 1;
  if (std::is_unsigned_v<decltype(a)> && n > kLast) return decltype(a){0};
  return static_cast<decltype(a)>(a >> std::min(n, kLast));
};
inline constexpr auto count_ones = [](uint32_t a) { return __builtin_popcount(a); };
inline constexpr auto reverse = [](uint32_t a) {
  uint32_t result = 0;
  for (int i = 0; i < 32; ++i) result |= (a >> i & 1) << (31 - i);
  return result;
};
inline constexpr auto find_shift = [](uint32_t a) { return a == 0 ? -1 : __builtin_clz(a); };
inline constexpr auto insert = [](auto a, auto b, uint32_t position, uint32_t length) {
  position &= 255, length &= 255;
  for (uint32_t i = 0; i < length && position + i < 8 * sizeof(a); ++i) {
    const auto bit = decltype(a){1} << (position + i);
    b = (a >> i & 1) != 0 ? b | bit : b & ~bit;
  }
  return b;
};
inline constexpr auto extract = [](uint32_t a, uint32_t position, uint32_t length) {
  const uint32_t moved = shift_right(a, position & 255);
  length &= 255;
  return length >= 32 ? moved : moved & ((1u << length) - 1);
};
// Shifts high:low to the left and returns the high word.
inline constexpr auto funnel_left = [](uint32_t low, uint32_t high, uint32_t n) {
  return ((uint64_t{high} << 32 | low) << (n & 31)) >> 32;
};
// A nibble of `selector` selects a byte of {b, a}, or its sign if the nibble's top bit is set.
inline constexpr auto permute = [](uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15;
    uint32_t byte = both >> (8 * (nibble & 7)) & 255;
    if ((nibble & 8) != 0) byte = byte >= 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
};

// --- Comparison and selection

inline constexpr auto equal = [](auto a, auto b) { return a == b; };
inline constexpr auto not_equal = [](auto a, auto b) { return (a < b) | (a > b); };  // not for NaN
inline constexpr auto less = [](auto a, auto b) { return a < b; };
inline constexpr auto less_equal = [](auto a, auto b) { return a <= b; };
inline constexpr auto greater = [](auto a, auto b) { return a > b; };
inline constexpr auto greater_equal = [](auto a, auto b) { return a >= b; };
// Unordered comparisons are also true if an operand is NaN.
template <auto opposite>
inline constexpr auto unordered = [](auto a, auto b) { return !opposite(a, b); };
inline constexpr auto any_nan = [](auto a, auto b) { return (a != a) | (b != b); };
inline constexpr auto select = [](auto a, auto b, uint8_t which) { return which != 0 ? a : b; };
inline constexpr auto copy = [](auto a) { return a; };

// --- Conversion

inline constexpr auto ceiling = [](double a) { return std::ceil(a); };

// Rounds floats towards zero.
template <typename To, typename From>
To convert(From x) {
  if constexpr (std::is_floating_point_v<From>) {
    if (x != x) {
      const bool wide = sizeof(From) == 8 || sizeof(To) == 8;
      return wide ? static_cast<To>(uint64_t{1} << (8 * sizeof(To) - 1)) : To{0};
    }
    // The smallest power of 2 above To's maximum. The type From may not represent that maximum.
    const From beyond = std::ldexp(From{1}, std::numeric_limits<To>::digits);
    if (x >= beyond) return std::numeric_limits<To>::max();
    if (x < static_cast<From>(std::numeric_limits<To>::min()))
      return std::numeric_limits<To>::min();
  }
  return static_cast<To>(x);
}

}  // namespace ptx
