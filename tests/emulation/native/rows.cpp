// rows.cpp -- row_pack against a sort, row_gather and row_unpack against a walk along the row.
#include <algorithm>
#include <numeric>

#include "cuda/row_gather.cuh"
#include "cuda/row_pack.cuh"
#include "cuda/row_unpack.cuh"
#include "support.h"

namespace {

using dct::DType;
using test::Floats;
using test::Random;

enum Encoding { kBitmap, kBytes, kPairs };

Encoding encoding(int64_t width, int64_t k) {
  const int64_t bitmap = (width + 7) / 8;
  if (width <= 256 && k < bitmap) return kBytes;
  return width <= 65536 && 2 * k < bitmap ? kPairs : kBitmap;
}

// The column of each slot; -1 where none is valid.
std::vector<int64_t> decode(const uint8_t* positions, int64_t width, int64_t k) {
  std::vector<int64_t> columns;
  int64_t last = -1;
  const Encoding kind = encoding(width, k);
  for (int64_t i = 0; kind != kBitmap && i < k; ++i) {
    const int64_t column =
        kind == kBytes ? positions[i] : positions[2 * i] + 256 * positions[2 * i + 1];
    columns.push_back(column < width && column > last ? column : -1);
    last = std::max(last, columns.back());
  }
  for (int64_t c = 0; kind == kBitmap && c < width; ++c) {
    if (positions[c / 8] >> (c % 8) & 1) columns.push_back(c);
  }
  columns.resize(k, -1);
  return columns;
}

DType any_dtype(Random& random) {
  return random.pick({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
}

void one_case(Random& random) {
  const int64_t width = random.pick<int64_t>({1, 7, 64, 65, 130, 300, 1024, 1025, 2100, 5000});
  const int64_t rows = random.pick<int64_t>({0, 1, 2, 9}), all = rows * width;
  const int64_t k =
      std::min(width, random.pick<int64_t>({1, 5, width / 20 + 1, width / 3 + 1, width}));
  const int64_t w = encoding(width, k) == kBytes   ? k
                    : encoding(width, k) == kPairs ? 2 * k
                                                   : (width + 7) / 8;
  const Floats x = Floats::random(random, any_dtype(random), all, true);
  Floats input = x;

  Floats values(any_dtype(random), rows * k, 0), packed = values;
  std::vector<uint8_t> positions(rows * w + 8, 0x5a), expected_positions = positions;
  for (int64_t row = 0; row < rows; ++row) {
    const auto key = [&](int64_t column) {
      const float magnitude = std::fabs(x[row * width + column]);
      return std::isnan(magnitude) ? INFINITY : magnitude;
    };
    std::vector<int64_t> order(width);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return key(a) > key(b); });
    std::sort(order.begin(), order.begin() + k);
    uint8_t* out = expected_positions.data() + row * w;
    if (encoding(width, k) == kBitmap) std::memset(out, 0, w);
    for (int64_t slot = 0; slot < k; ++slot) {
      const int64_t column = order[slot];
      packed.set(row * k + slot, x[row * width + column]);
      if (encoding(width, k) == kBitmap) out[column / 8] |= 1 << column % 8;
      if (encoding(width, k) == kBytes) out[slot] = static_cast<uint8_t>(column);
      if (encoding(width, k) == kPairs) {
        out[2 * slot] = static_cast<uint8_t>(column);
        out[2 * slot + 1] = static_cast<uint8_t>(column >> 8);
      }
    }
  }
  const dct::RowPackArgs pack = {input.data(), x.dtype,         rows, width, k, values.data(),
                                 values.dtype, positions.data()};
  test::expect(dct::cuda::row_pack(pack, nullptr) == cudaSuccess, "launch row_pack");
  test::expect_equal(values.bytes, packed.bytes, "packed values, byte");
  test::expect_equal(positions, expected_positions, "positions, byte");

  if (random.chance(0.6) && rows > 0) {
    for (int i = 0; i < 5; ++i) {
      positions[random.below(rows * w)] = static_cast<uint8_t>(random.below(256));
    }
  }
  Floats gathered(any_dtype(random), rows * k, 0), expected_gathered = gathered;
  Floats spread(any_dtype(random), all, random.pick({0, 1})), expected_spread = spread;
  for (int64_t i = 0; i < all; ++i) expected_spread.set(i, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    const std::vector<int64_t> columns = decode(positions.data() + row * w, width, k);
    for (int64_t slot = 0; slot < k; ++slot) {
      const int64_t at = row * width + columns[slot];
      expected_gathered.set(row * k + slot, columns[slot] < 0 ? 0.0f : x[at]);
      if (columns[slot] >= 0) expected_spread.set(at, packed[row * k + slot]);
    }
  }
  const dct::RowGatherArgs gather = {input.data(), x.dtype, positions.data(), rows,
                                     width,        k,       gathered.data(),  gathered.dtype};
  test::expect(dct::cuda::row_gather(gather, nullptr) == cudaSuccess, "launch row_gather");
  test::expect_equal(gathered.bytes, expected_gathered.bytes, "gathered, byte");
  const dct::RowUnpackArgs unpack = {values.data(), values.dtype, positions.data(), rows, width, k,
                                     spread.data(), spread.dtype};
  test::expect(dct::cuda::row_unpack(unpack, nullptr) == cudaSuccess, "launch row_unpack");
  test::expect_equal(spread.bytes, expected_spread.bytes, "unpacked, byte");
}

}  // namespace

int main(int argc, char** argv) { return test::run(argc, argv, 12, one_case); }
