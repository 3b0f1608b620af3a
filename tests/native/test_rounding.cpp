// Compares the float conversions with the definitions of the formats.

#include "../../csrc/common/floats.h"
#include "support.h"

using namespace dct;
using namespace dct::test;

namespace {

template <typename T>
void check_decoding() {
  for (uint32_t u = 0; u < 65536; ++u) {
    T x;
    x.bits = static_cast<uint16_t>(u);
    const double expected = decode<T>(u), got = to_float(x);
    CHECK(std::isnan(expected) ? std::isnan(got)
                               : got == expected && std::signbit(got) == std::signbit(expected),
          "pattern %x: expected %g, got %g", u, expected, got);
  }
}

void check_rounding(uint32_t u) {
  const float x = from_bits(u);
  CHECK(bits(round_to<float>(x)) == encode<float>(x), "float32 %08x", u);
  CHECK(bits(round_to<BFloat16>(x)) == encode<BFloat16>(x), "bfloat16 of %08x", u);
  CHECK(bits(round_to<Float16>(x)) == encode<Float16>(x), "float16 of %08x", u);
  CHECK(bits(round_saturating<float>(x)) == encode<float>(x, true), "saturating float32 %08x", u);
  CHECK(bits(round_saturating<BFloat16>(x)) == encode<BFloat16>(x, true),
        "saturating bfloat16 of %08x", u);
  CHECK(is_finite(x) == std::isfinite(x), "is_finite of %08x", u);
  const float magnitude = std::isnan(x) ? HUGE_VALF : std::fabs(x);
  CHECK(from_bits(magnitude_key(x)) == magnitude, "magnitude key of %08x", u);
}

}  // namespace

int main() {
  check_decoding<BFloat16>();
  check_decoding<Float16>();
  // Tests every upper half with lower halves around ties, and then bit patterns at equal distances.
  for (uint32_t high = 0; high < 65536; ++high) {
    for (uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x2000u, 0x3000u, 0x7fffu,
                         0x8000u, 0x8001u, 0xefffu, 0xf000u, 0xf001u, 0xffffu}) {
      check_rounding(high << 16 | low);
    }
  }
  for (uint64_t u = 0; u <= UINT32_MAX; u += 4001) check_rounding(static_cast<uint32_t>(u));
}
