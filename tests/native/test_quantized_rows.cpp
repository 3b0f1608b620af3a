// Compares row_quantize with the definitions of the formats. The fuzzer checks row_dequantize.

#include "../../csrc/cpu/kernels.h"
#include "row_oracle.h"
#include "support.h"

using namespace dct;
using namespace dct::test;

namespace {

template <typename X>
void run(Random& random, int64_t rows, int64_t width, RowFormat format) {
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
  Random random(5);
  for (RowFormat format : {RowFormat::kInt8, RowFormat::kInt4, RowFormat::kSign}) {
    for (int64_t width : {1,  2,  4,   5,   6,   7,    8,    9,    31,   32,   33,  63,
                          64, 65, 127, 128, 320, 1000, 1023, 1024, 1025, 2049, 5000}) {
      const int64_t rows = width > 2000 ? 3 : random.pick<int64_t>({0, 1, 5, 17});
      run<float>(random, rows, width, format);
      run<BFloat16>(random, rows, width, format);
      run<Float16>(random, rows, width, format);
    }
  }
}
