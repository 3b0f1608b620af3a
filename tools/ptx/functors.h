// functors.h -- what opcodes compute, of one lane.
//
// https://docs.nvidia.com/cuda/parallel-thread-execution is the definition.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
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

// --- Arithmetic. What integers overflow to wraps; a result that is not a number has these bits.

template <typename T>
T one_nan(T x) {
  if constexpr (sizeof(T) == 4) return x != x ? bits<T>(0x7fffffffu) : x;
  return x;
}

template <typename T>
using Unsigned = std::make_unsigned_t<T>;

struct Add {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>)
      return one_nan(a + b);
    else
      return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
  }
};
struct Subtract {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>)
      return one_nan(a - b);
    else
      return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
  }
};
struct Multiply {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>)
      return one_nan(a * b);
    else
      return static_cast<T>(uint64_t(a) * uint64_t(b));
  }
};
struct MultiplyHigh {
  template <typename T>
  T operator()(T a, T b) const {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>(Wide{a} * Wide{b} >> (8 * sizeof(T)));
  }
};
struct MultiplyWide {
  template <typename T>
  auto operator()(T a, T b) const {
    using Signed = std::conditional_t<sizeof(T) == 2, int32_t, int64_t>;
    using Wide = std::conditional_t<std::is_signed_v<T>, Signed, Unsigned<Signed>>;
    return static_cast<Wide>(Wide{a} * Wide{b});
  }
};
struct MultiplyAdd {
  template <typename T>
  T operator()(T a, T b, T c) const {
    return static_cast<T>(uint64_t(a) * uint64_t(b) + uint64_t(c));
  }
};
struct FusedMultiplyAdd {
  float operator()(float a, float b, float c) const { return one_nan(std::fma(a, b, c)); }
};
struct MultiplyAddWide {
  template <typename T, typename Wide>
  Wide operator()(T a, T b, Wide c) const {
    return static_cast<Wide>(uint64_t(Wide{a}) * uint64_t(Wide{b}) + uint64_t(c));
  }
};
struct Divide {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) {
      return one_nan(a / b);
    } else {
      if (b == 0) return static_cast<T>(-1);  // unspecified; what GPUs give
      if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Subtract()(T{0}, a);
      return a / b;
    }
  }
};
struct Remainder {
  template <typename T>
  T operator()(T a, T b) const {
    if (b == 0 || (std::is_signed_v<T> && b == static_cast<T>(-1))) return b == 0 ? a : 0;
    return a % b;
  }
};

// Of a number and what is not one, the number. -0.0 is less than 0.0.
template <bool kLeast>
struct Extreme {
  template <typename T>
  T operator()(T a, T b) const {
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
};
using Min = Extreme<true>;
using Max = Extreme<false>;

struct MinAboveZero {
  template <typename T>
  T operator()(T a, T b) const {
    return std::max<T>(std::min(a, b), 0);
  }
};
struct MaxAndZero {
  int32_t operator()(int32_t a, int32_t b) const { return std::max({a, b, 0}); }
};

// Signs are bits, those of NaN too.
struct Absolute {
  float operator()(float a) const { return std::fabs(a); }
};
struct Negate {
  template <typename T>
  T operator()(T a) const {
    if constexpr (std::is_floating_point_v<T>)
      return -a;
    else
      return Subtract()(T{0}, a);
  }
};

// --- Bits

using And = std::bit_and<>;
using Or = std::bit_or<>;
using Xor = std::bit_xor<>;

struct Not {
  template <typename T>
  T operator()(T a) const {
    return static_cast<T>(~a);
  }
};
struct NotPredicate {
  uint8_t operator()(uint8_t a) const { return a ^ 1; }
};
// Amounts beyond the width are as the width.
struct ShiftLeft {
  template <typename T>
  T operator()(T a, uint32_t b) const {
    return b >= 8 * sizeof(T) ? T{0} : static_cast<T>(uint64_t{a} << (b & 63));
  }
};
struct ShiftRight {
  template <typename T>
  T operator()(T a, uint32_t b) const {
    constexpr uint32_t kLast = 8 * sizeof(T) - 1;
    if (b > kLast) return std::is_signed_v<T> ? static_cast<T>(a >> kLast) : T{0};
    return static_cast<T>(a >> (b & kLast));
  }
};
struct CountOnes {
  uint32_t operator()(uint32_t a) const { return __builtin_popcount(a); }
};
struct Reverse {
  uint32_t operator()(uint32_t a) const {
    uint32_t result = 0;
    for (int i = 0; i < 32; ++i) result |= (a >> i & 1) << (31 - i);
    return result;
  }
};
struct FindShift {
  uint32_t operator()(uint32_t a) const { return a == 0 ? ~0u : __builtin_clz(a); }
};
struct Insert {
  template <typename T>
  T operator()(T a, T b, uint32_t position, uint32_t length) const {
    position &= 255, length &= 255;
    for (uint32_t i = 0; i < length && position + i < 8 * sizeof(T); ++i) {
      const T bit = T{1} << (position + i);
      b = (a >> i & 1) != 0 ? b | bit : b & ~bit;
    }
    return b;
  }
};
// What is above the top bit is the field's sign, or 0.
struct Extract {
  template <typename T>
  T operator()(T a, uint32_t position, uint32_t length) const {
    position &= 255, length &= 255;
    if (length == 0) return 0;
    const T high = std::is_signed_v<T> && a < 0 ? T(-1) : T{0};
    const T moved = position > 31 ? high : static_cast<T>(a >> position);
    if (length > 31) return moved;
    const int unused = 32 - static_cast<int>(length);
    return static_cast<T>(static_cast<T>(uint32_t(moved) << unused) >> unused);
  }
};
// The high word of high:low moved up.
struct FunnelLeft {
  uint32_t operator()(uint32_t low, uint32_t high, uint32_t n) const {
    return static_cast<uint32_t>(((uint64_t{high} << 32 | low) << (n & 31)) >> 32);
  }
};
// Each nibble of `selector` names a byte of {b, a}; its top bit asks for that byte's sign instead.
struct Permute {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t selector) const {
    const uint64_t both = uint64_t{b} << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
      const uint32_t nibble = selector >> (4 * i) & 15;
      uint32_t byte = both >> (8 * (nibble & 7)) & 255;
      if ((nibble & 8) != 0) byte = byte >= 128 ? 255 : 0;
      result |= byte << (8 * i);
    }
    return result;
  }
};

// --- Comparison and selection

using Equal = std::equal_to<>;
using Less = std::less<>;
using LessEqual = std::less_equal<>;
using Greater = std::greater<>;
using GreaterEqual = std::greater_equal<>;
struct NotEqual {  // of floats: and both are numbers
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return (a < b) | (a > b);
  }
};
struct Numbers {
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return (a == a) & (b == b);
  }
};
template <typename Opposite>
struct Unordered {  // true as well if one of them is not a number
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return Opposite()(a, b) ^ 1;
  }
};
struct Select {
  template <typename T>
  T operator()(T a, T b, uint8_t which) const {
    return which != 0 ? a : b;
  }
};
struct Copy {
  template <typename T>
  T operator()(T a) const {
    return a;
  }
};

// --- Conversion

struct Ceiling {
  double operator()(double a) const { return std::ceil(a); }
};
// Floats are rounded towards zero.
template <typename To>
struct Convert {
  template <typename From>
  To operator()(From x) const {
    if constexpr (std::is_floating_point_v<From>) {
      if (x != x) {
        const bool wide = sizeof(From) == 8 || sizeof(To) == 8;
        return wide ? static_cast<To>(uint64_t{1} << (8 * sizeof(To) - 1)) : To{0};
      }
      // 2 to the power of what To's largest value does not reach: exact, unlike that value itself.
      const From beyond = std::ldexp(From{1}, std::numeric_limits<To>::digits);
      if (x >= beyond) return std::numeric_limits<To>::max();
      if (x < static_cast<From>(std::numeric_limits<To>::min()))
        return std::numeric_limits<To>::min();
    }
    return static_cast<To>(x);
  }
};

}  // namespace ptx
