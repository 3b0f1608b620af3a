// halves.cpp -- what is done with 16 bits, one number or two side by side.
#include <algorithm>
#include <cmath>
#include <limits>

#include "forms.h"
#include "functors.h"

namespace ptx {
namespace {

constexpr uint16_t kMagnitude = 0x7fff, kInfinity = 0x7c00;

bool is_nan(uint16_t half) { return (half & kMagnitude) > kInfinity; }

// What is below the leading bit counts in units of 2^-10 of it, but of 2^-24 at least.
constexpr int kFraction = 10, kLeast = -24;
struct Widen {
  float operator()(uint16_t a) const {
    if (is_nan(a)) return one_nan(std::nanf(""));
    const int exponent = (a & kMagnitude) >> kFraction, fraction = a & ((1 << kFraction) - 1);
    float x = std::ldexp(float(1 << kFraction | fraction), kLeast - 1 + exponent);
    if (exponent == 0) x = std::ldexp(float(fraction), kLeast);
    if ((a & kMagnitude) == kInfinity) x = std::numeric_limits<float>::infinity();
    return (a & ~kMagnitude) != 0 ? -x : x;
  }
};
template <typename Relation>
struct Compare {
  uint8_t operator()(uint16_t a, uint16_t b) const { return Relation()(Widen()(a), Widen()(b)); }
};
using AnyNan = Compare<Unordered<Numbers>>;

struct Narrow {
  uint16_t operator()(float a) const {
    if (a != a) return kMagnitude;
    const auto sign = static_cast<uint16_t>(bits<uint32_t>(a) >> 16 & ~kMagnitude);
    const float x = std::fabs(a);
    if (x >= 65520) return sign | kInfinity;  // halfway from the largest number to 2^16
    if (x == 0) return sign;
    const int unit = std::max(std::ilogb(x) - kFraction, kLeast);
    // A leading bit that is there adds 1 to the exponent, and so does a carry.
    const auto units = static_cast<int>(std::nearbyint(std::ldexp(x, -unit)));
    return static_cast<uint16_t>(sign | (((unit - kLeast) << kFraction) + units));
  }
};
struct NarrowBoth {
  uint32_t operator()(float high, float low) const {
    return uint32_t{Narrow()(high)} << 16 | Narrow()(low);
  }
};
struct Magnitudes {
  uint32_t operator()(uint32_t a) const { return a & (kMagnitude << 16 | kMagnitude); }
};
template <typename F, typename T>
struct Both {
  uint32_t operator()(uint32_t a, uint32_t b) const {
    const T low = F()(static_cast<T>(a), static_cast<T>(b));
    const T high = F()(static_cast<T>(a >> 16), static_cast<T>(b >> 16));
    return uint32_t{static_cast<uint16_t>(high)} << 16 | static_cast<uint16_t>(low);
  }
};

// A predicate of the lower halves, and if it is asked for one of the higher.
void any_nan_of_both(char* registers, const Instruction& i, uint32_t lanes) {
  const auto* a = lanes_of<const uint32_t>(registers, i.from[0]);
  const auto* b = lanes_of<const uint32_t>(registers, i.from[1]);
  auto* low = lanes_of<uint8_t>(registers, i.to[0]);
  for_each_lane(lanes, [&](int lane) {
    low[lane] = AnyNan()(static_cast<uint16_t>(a[lane]), static_cast<uint16_t>(b[lane]));
    if (i.to[1].at == kNone) return;
    lanes_of<uint8_t>(registers, i.to[1])[lane] = AnyNan()(a[lane] >> 16, b[lane] >> 16);
  });
}

}  // namespace

void add_halves(Forms& forms) {
  forms["setp.nan.f16"] = form<AnyNan, uint8_t, uint16_t, uint16_t>();
  forms["setp.lt.f16"] = form<Compare<Less>, uint8_t, uint16_t, uint16_t>();
  forms["setp.nan.f16x2"] = {any_nan_of_both, {1, 1}, {4, 4}};
  forms["cvt.f32.f16"] = form<Widen, float, uint16_t>();
  forms["cvt.rn.f16.f32"] = form<Narrow, uint16_t, float>();
  forms["cvt.rn.f16x2.f32"] = form<NarrowBoth, uint32_t, float, float>();
  forms["abs.f16x2"] = form<Magnitudes, uint32_t, uint32_t>();
  forms["add.s16x2"] = form<Both<Add, int16_t>, uint32_t, uint32_t, uint32_t>();
  forms["max.u16x2"] = form<Both<Max, uint16_t>, uint32_t, uint32_t, uint32_t>();
  forms["min.s16x2.relu"] = form<Both<MinAboveZero, int16_t>, uint32_t, uint32_t, uint32_t>();
  forms["min.u16x2"] = form<Both<Min, uint16_t>, uint32_t, uint32_t, uint32_t>();
}

}  // namespace ptx
