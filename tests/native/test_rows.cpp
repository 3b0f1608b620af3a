// Compares row_pack with a stable sort, and row_quantize with the definitions of the formats. The
// fuzzer checks row_gather, row_unpack and row_dequantize.

#include "../../csrc/cpu/kernels.h"
#include "positions_oracle.h"
#include "row_oracle.h"
#include "support.h"

using namespace dct;
using namespace dct::test;

namespace {

template <typename X, typename Value>
void pack(Random& random, int64_t rows, int64_t width, int64_t k) {
  const int64_t bytes = position_bytes(width, k);
  std::vector<X> x = random.reals<X>(rows * width);
  if (random.chance(0.3)) {  // many ties
    for (X& v : x) v = make<X>(static_cast<double>(random.integer(-2, 2)));
  } else if (random.chance(0.5)) {  // the magnitude changes at some rows
    int exponent = 0;
    for (int64_t i = 0; i < rows * width; ++i) {
      if (i % width == 0 && random.chance(0.3)) exponent = static_cast<int>(random.integer(-9, 9));
      const auto mantissa = static_cast<double>(random.integer(-99999, 99999));
      x[i] = make<X>(std::ldexp(mantissa, exponent - 17));
    }
  }
  std::vector<Value> values(rows * k);
  std::vector<uint8_t> positions(rows * bytes + 1);
  uint8_t* odd = positions.data() + 1;  // rows need no alignment
  with_threads(random.integer(1, 4), [&](const cpu::Parallel& p) {
    cpu::row_pack({x.data(), kDType<X>, rows, width, k, values.data(), kDType<Value>, odd}, p);
  });
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<int64_t> order(width);
    for (int64_t c = 0; c < width; ++c) order[c] = c;
    auto magnitude = [&](int64_t c) {
      const double v = std::fabs(value(x[row * width + c]));
      return std::isnan(v) ? HUGE_VAL : v;
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return magnitude(a) > magnitude(b); });
    std::sort(order.begin(), order.begin() + k);
    const std::vector<int64_t> columns = columns_of(odd + row * bytes, width, k);
    for (int64_t slot = 0; slot < k; ++slot) {
      CHECK(columns[slot] == order[slot],
            "row_pack width %ld, k %ld, slot %ld: column %ld, got %ld", long(width), long(k),
            long(slot), long(order[slot]), long(columns[slot]));
      const double expected = value(x[row * width + order[slot]]);
      CHECK(bits(values[row * k + slot]) == encode<Value>(expected), "row_pack value %g", expected);
    }
    if (bytes == (width + 7) / 8 && width % 8 != 0) {
      CHECK(odd[(row + 1) * bytes - 1] >> (width % 8) == 0, "bits past the width must be 0");
    }
  }
}

template <typename X>
void quantize(Random& random, int64_t rows, int64_t width, RowFormat format) {
  const int64_t bytes = row_bytes(width, format);
  std::vector<X> x = random.reals<X>(rows * width);
  for (int64_t row = 0; row < rows; ++row) {  // otherwise few rows would be finite
    if (random.chance(0.2)) continue;
    for (int64_t c = 0; c < width; ++c) {
      X& v = x[row * width + c];
      if (!std::isfinite(value(v)) || random.chance(0.1)) v = make<X>(random.integer(-3, 3) / 2.0);
    }
  }
  std::vector<uint8_t> quantized(rows * bytes + 1);
  uint8_t* odd = quantized.data() + 1;  // rows need no alignment
  with_threads(random.integer(1, 4), [&](const cpu::Parallel& p) {
    cpu::row_quantize({x.data(), kDType<X>, rows, width, format, odd}, p);
  });
  std::vector<double> reals;
  for (const X& v : x) reals.push_back(value(v));
  std::vector<int> codes;
  for (int64_t row = 0; row < rows; ++row) {
    const uint32_t scale = expected_codes(reals.data() + row * width, width, format, codes);
    if (scale == 0 || scale == 0x7fc0) std::fill(codes.begin(), codes.end(), 0);
    const std::vector<uint8_t> expected = packed(codes, scale, format);
    for (int64_t i = 0; i < bytes; ++i) {
      CHECK(odd[row * bytes + i] == expected[i], "format %d, width %ld, byte %ld: %d, got %d",
            int(format), long(width), long(i), expected[i], odd[row * bytes + i]);
    }
  }
}

}  // namespace

int main() {
  Random random(4);
  for (int64_t width : {1, 7, 8, 9, 63, 64, 65, 128, 255, 256, 257, 1000, 65536, 65537}) {
    for (int64_t k : {int64_t{1}, width / 20, width / 9, width / 2, width}) {
      if (k < 1 || (width > 2000 && k > width / 9)) continue;
      const int64_t rows = width > 2000 ? 1 : random.pick<int64_t>({0, 1, 5, 17});
      pack<float, float>(random, rows, width, k);
      pack<float, Float16>(random, rows, width, k);
      pack<BFloat16, BFloat16>(random, rows, width, k);
      pack<Float16, float>(random, rows, width, k);
    }
  }
  for (RowFormat format : {RowFormat::kInt8, RowFormat::kInt4, RowFormat::kSign}) {
    for (int64_t width : {1,  2,  4,   5,   6,   7,    8,    9,    31,   32,   33,  63,
                          64, 65, 127, 128, 320, 1000, 1023, 1024, 1025, 2049, 5000}) {
      const int64_t rows = width > 2000 ? 3 : random.pick<int64_t>({0, 1, 5, 17});
      quantize<float>(random, rows, width, format);
      quantize<BFloat16>(random, rows, width, format);
      quantize<Float16>(random, rows, width, format);
    }
  }
}
