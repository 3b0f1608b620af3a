// quantized_rows.cpp -- row_quantize and row_dequantize against docs/reference/ops.md, row by
// row.
#include <numeric>

#include "cuda/row_dequantize.cuh"
#include "cuda/row_quantize.cuh"
#include "support.h"

namespace {

using dct::DType;
using dct::RowFormat;
using test::Floats;
using test::Random;

constexpr uint32_t kNan = 0x7fc0, kSmallestNormal = 0x0080;  // raw bfloat16

int codes_in_byte(RowFormat format) {
  return format == RowFormat::kInt8      ? 1
         : format == RowFormat::kInt4    ? 2
         : format == RowFormat::kTernary ? 5
                                         : 8;
}

int64_t bytes_of_row(int64_t width, RowFormat format) {
  const int64_t each = codes_in_byte(format);
  return (width + each - 1) / each + 2;
}

uint32_t scale_of(float x) {
  const uint32_t scale = test::narrow(x, DType::kBFloat16, true);
  return scale < kSmallestNormal ? 0 : scale;
}

// Of counts of units.
float mean(const std::vector<double>& units) {
  const double total = std::accumulate(units.begin(), units.end(), 0.0);  // exact
  return units.empty() ? 0.0f : static_cast<float>(total) / static_cast<float>(units.size());
}

// Codes of a row, numbers from -128 to 127; returns its scale.
uint32_t quantize(const std::vector<float>& row, RowFormat format, std::vector<int>& codes) {
  codes.assign(row.size(), 0);
  float top = 0;
  for (float x : row) {
    if (!std::isfinite(x)) return kNan;
    top = std::max(top, std::fabs(x));
  }
  uint32_t scale;
  if (format == RowFormat::kInt8 || format == RowFormat::kInt4) {
    scale = scale_of(top / (format == RowFormat::kInt8 ? 127.0f : 7.0f));
    const float inverse = 1.0f / test::widen(scale == 0 ? 0x3f80 : scale, DType::kBFloat16);
    for (size_t i = 0; i < row.size(); ++i) {
      codes[i] = static_cast<int>(std::nearbyint(row[i] * inverse));
    }
  } else {
    const double unit = std::ldexp(1.0, top > 0 ? std::max(std::ilogb(top) - 21, -126) : -126);
    std::vector<double> all, kept;
    for (float x : row) all.push_back(std::floor(std::fabs(x) / unit));
    const float bound = 0.75f * mean(all);
    for (size_t i = 0; i < row.size(); ++i) {
      const bool keep = std::fabs(row[i]) / unit > bound;
      if (keep) kept.push_back(all[i]);
      if (format == RowFormat::kSign) codes[i] = row[i] < 0;
      if (format == RowFormat::kTernary && keep) codes[i] = row[i] < 0 ? -1 : 1;
    }
    const float units = mean(format == RowFormat::kSign ? all : kept);
    scale = scale_of(units * static_cast<float>(unit));
  }
  if (scale == 0) codes.assign(row.size(), 0);
  return scale;
}

void write(const std::vector<int>& codes, uint32_t scale, RowFormat format, uint8_t* out) {
  const int64_t each = codes_in_byte(format), width = codes.size();
  const int base = format == RowFormat::kInt4 ? 16 : format == RowFormat::kTernary ? 3 : 2;
  for (int64_t begin = 0; begin < width; begin += each) {
    int sum = 0, place = 1;
    for (int64_t i = begin; i < std::min(begin + each, width); ++i, place *= base) {
      sum += (format == RowFormat::kInt4 ? codes[i] & 15 : codes[i]) * place;
    }
    *out++ = static_cast<uint8_t>(sum);
  }
  *out++ = static_cast<uint8_t>(scale);
  *out = static_cast<uint8_t>(scale >> 8);
}

int read_code(const uint8_t* row, int64_t column, RowFormat format) {
  const int64_t each = codes_in_byte(format);
  const int byte = row[column / each], at = static_cast<int>(column % each);
  if (format == RowFormat::kInt8) return static_cast<int8_t>(byte);
  if (format == RowFormat::kSign) return byte >> at & 1 ? -1 : 1;
  if (format == RowFormat::kInt4) {
    const int nibble = byte >> (4 * at) & 15;
    return nibble > 7 ? nibble - 16 : nibble;
  }
  // What is no sum of five codes reads as 121, which is all ones.
  const int number = static_cast<int8_t>(byte);
  int left = (number < -121 || number > 121 ? 121 : number) + 121;
  for (int i = 0; i < at; ++i) left /= 3;
  return left % 3 - 1;
}

DType any_dtype(Random& random) {
  return random.pick({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
}

void one_case(Random& random) {
  const int64_t width = random.pick<int64_t>({1, 5, 33, 64, 65, 130, 300, 513, 1024, 1025, 1500});
  const int64_t rows = random.pick<int64_t>({0, 1, 2, 9, 70});
  const auto format = static_cast<RowFormat>(random.below(4));
  const int64_t bytes = bytes_of_row(width, format);

  Floats x = Floats::random(random, any_dtype(random), rows * width, false);
  const bool hard = random.chance(0.3);
  for (int64_t row = 0; row < rows; ++row) {
    const float times = random.pick({0.0f, 1.0f, 1.0f, 1e-37f, 1e-43f, 6e37f});
    for (int64_t i = row * width; i < (row + 1) * width; ++i) x.set(i, x[i] * times);
    if (hard && random.chance(0.5)) x.set(row * width + random.below(width), random.value(true));
  }
  const int64_t offset = random.below(16);
  std::vector<uint8_t> packed(offset + rows * bytes + 16, 0x5a), expected = packed;
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<float> values(width);
    for (int64_t c = 0; c < width; ++c) values[c] = x[row * width + c];
    std::vector<int> codes;
    const uint32_t scale = quantize(values, format, codes);
    write(codes, scale, format, expected.data() + offset + row * bytes);
  }
  const dct::RowQuantizeArgs quantize = {x.data(), x.dtype, rows,
                                         width,    format,  packed.data() + offset};
  test::expect(dct::cuda::row_quantize(quantize, nullptr) == cudaSuccess, "launch row_quantize");
  test::expect_equal(packed, expected, "quantized, byte");

  if (random.chance(0.5)) {  // whatever they are
    for (int64_t i = 0; i < rows * bytes; ++i) {
      packed[offset + i] = static_cast<uint8_t>(random.below(256));
    }
  }
  Floats out(any_dtype(random), rows * width, random.pick({0, 0, 1})), expected_out = out;
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* from = packed.data() + offset + row * bytes;
    const float scale = test::widen(from[bytes - 2] + 256 * from[bytes - 1], DType::kBFloat16);
    for (int64_t c = 0; c < width; ++c) {
      expected_out.set(row * width + c, static_cast<float>(read_code(from, c, format)) * scale);
    }
  }
  const dct::RowDequantizeArgs dequantize = {
      packed.data() + offset, rows, width, format, out.data(), out.dtype};
  test::expect(dct::cuda::row_dequantize(dequantize, nullptr) == cudaSuccess,
               "launch row_dequantize");
  test::expect_equal(out.bytes, expected_out.bytes, "dequantized, byte");
}

}  // namespace

int main(int argc, char** argv) { return test::run(argc, argv, 16, one_case); }
