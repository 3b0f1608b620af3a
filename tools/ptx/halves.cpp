// halves.cpp -- operations on one or two packed 16-bit numbers.
#include <algorithm>
#include <cmath>
#include <limits>

#include "forms.h"
#include "functors.h"

namespace ptx {
namespace {

constexpr uint16_t kMagnitude = 0x7fff, kInfinity = 0x7c00;

bool is_nan(uint16_t half) { return (half & kMagnitude) > kInfinity; }

// The unit of the fraction is 2^-10 times the leading bit, but at least 2^-24.
constexpr int kFraction = 10, kLeast = -24;
float widen(uint16_t a) {
  if (is_nan(a)) return one_nan(std::nanf(""));
  const int exponent = (a & kMagnitude) >> kFraction, fraction = a & ((1 << kFraction) - 1);
  float x = std::ldexp(float(1 << kFraction | fraction), kLeast - 1 + exponent);
  if (exponent == 0) x = std::ldexp(float(fraction), kLeast);
  if ((a & kMagnitude) == kInfinity) x = std::numeric_limits<float>::infinity();
  return (a & ~kMagnitude) != 0 ? -x : x;
}

uint16_t narrow(float a) {
  if (a != a) return kMagnitude;
  const auto sign = static_cast<uint16_t>(bits<uint32_t>(a) >> 16 & ~kMagnitude);
  const float x = std::fabs(a);
  if (x >= 65520) return sign | kInfinity;  // halfway between the largest number and 2^16
  if (x == 0) return sign;
  const int unit = std::max(std::ilogb(x) - kFraction, kLeast);
  // The leading bit of `units` adds 1 to the exponent, and so does a carry from rounding.
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(x, -unit)));
  return static_cast<uint16_t>(sign | (((unit - kLeast) << kFraction) + units));
}
uint32_t narrow_both(float high, float low) { return uint32_t{narrow(high)} << 16 | narrow(low); }

bool is_less(uint16_t a, uint16_t b) { return widen(a) < widen(b); }
bool any_is_nan(uint16_t a, uint16_t b) { return is_nan(a) || is_nan(b); }

uint32_t magnitudes(uint32_t a) { return a & (kMagnitude << 16 | kMagnitude); }

template <auto f, typename T>
uint32_t both(uint32_t a, uint32_t b) {
  const auto low = static_cast<uint16_t>(f(static_cast<T>(a), static_cast<T>(b)));
  const auto high = static_cast<uint16_t>(f(static_cast<T>(a >> 16), static_cast<T>(b >> 16)));
  return uint32_t{high} << 16 | low;
}

// Sets a predicate for the low halves and, if there is a second result, one for the high halves.
void any_nan_of_both(char* registers, const Instruction& i, uint32_t lanes) {
  const auto* a = lanes_of<const uint32_t>(registers, i.from[0]);
  const auto* b = lanes_of<const uint32_t>(registers, i.from[1]);
  auto* low = lanes_of<uint8_t>(registers, i.to[0]);
  for_each_lane(lanes, [&](int lane) {
    low[lane] = any_is_nan(static_cast<uint16_t>(a[lane]), static_cast<uint16_t>(b[lane]));
    if (i.to[1].at == kNone) return;
    lanes_of<uint8_t>(registers, i.to[1])[lane] = any_is_nan(a[lane] >> 16, b[lane] >> 16);
  });
}

}  // namespace

void add_halves(Forms& forms) {
  forms["setp.nan.f16"] = form<any_is_nan, uint8_t, uint16_t, uint16_t>();
  forms["setp.lt.f16"] = form<is_less, uint8_t, uint16_t, uint16_t>();
  forms["setp.nan.f16x2"] = {any_nan_of_both, {1, 1}, {4, 4}};
  forms["cvt.f32.f16"] = form<widen, float, uint16_t>();
  forms["cvt.rn.f16.f32"] = form<narrow, uint16_t, float>();
  forms["cvt.rn.f16x2.f32"] = form<narrow_both, uint32_t, float, float>();
  forms["abs.f16x2"] = form<magnitudes, uint32_t, uint32_t>();
  forms["add.s16x2"] = form<both<add, int16_t>, uint32_t, uint32_t, uint32_t>();
  forms["max.u16x2"] = form<both<most, uint16_t>, uint32_t, uint32_t, uint32_t>();
  forms["min.s16x2.relu"] = form<both<least_above_zero, int16_t>, uint32_t, uint32_t, uint32_t>();
  forms["min.u16x2"] = form<both<least, uint16_t>, uint32_t, uint32_t, uint32_t>();
}

}  // namespace ptx
