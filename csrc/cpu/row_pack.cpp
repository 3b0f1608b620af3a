#include "row_pack.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "../common/rounding.h"
#include "../common/rows.h"
#include "bitmask.h"
#include "row_positions.h"
#include "row_select.h"
#include "vectorise.h"

namespace dct::cpu {
namespace {

// One task's working memory, for rows of `width` columns.
struct Scratch {
  Scratch(int64_t width, int64_t k)
      : selector(width, k),
        rows(new float[kLanes * whole_lanes(width)]),
        flags(new uint8_t[64 * bitmask_words(width)]),
        bits(new uint64_t[bitmask_words(width)]) {}
  RowSelector selector;
  std::unique_ptr<float[]> rows;     // in float32
  std::unique_ptr<uint8_t[]> flags;  // of one row, 1 where a column is kept
  std::unique_ptr<uint64_t[]> bits;
};

// What the bits of every X are multiples of in float32.
template <typename X>
constexpr int32_t kUnit = std::is_same_v<X, float>      ? 1
                          : std::is_same_v<X, BFloat16> ? 1 << 16
                                                        : 1 << 13;

// Rows in float32, filled up to whole vectors with 0.0.
template <typename X>
const float* as_floats(const X* x, int64_t rows, int64_t width, const Scratch& scratch) {
  const int64_t padded = whole_lanes(width);
  if constexpr (std::is_same_v<X, float>) {
    if (width == padded) return x;
  }
  vectorise([&] {
    for (int64_t row = 0; row < rows; ++row) {
      float* to = scratch.rows.get() + row * padded;
      for (int64_t i = 0; i < width; ++i) to[i] = to_float(x[row * width + i]);
      for (int64_t i = width; i < padded; ++i) to[i] = 0.0f;
    }
  });
  return scratch.rows.get();
}

void write_positions(const Scratch& scratch, int64_t rows, int64_t width, int64_t k,
                     uint8_t* positions) {
  const int32_t* columns = scratch.selector.columns();
  const int64_t bytes = position_bytes(width, k);
  switch (position_encoding(width, k)) {
    case PositionEncoding::kBitmap:
      for (int64_t row = 0; row < rows; ++row, columns += k) {
        std::memset(scratch.flags.get(), 0, width);
        for (int64_t slot = 0; slot < k; ++slot) scratch.flags[columns[slot]] = 1;
        pack_bits(scratch.flags.get(), width, scratch.bits.get());
        std::memcpy(positions + row * bytes, scratch.bits.get(), bytes);
      }
      break;
    case PositionEncoding::kUint8:
      for (int64_t i = 0; i < rows * k; ++i) positions[i] = static_cast<uint8_t>(columns[i]);
      break;
    case PositionEncoding::kUint16:
      for (int64_t i = 0; i < rows * k; ++i) store_uint16(positions + 2 * i, columns[i]);
      break;
  }
}

template <typename X, typename Value>
void pack_rows(const RowPackArgs& args, const Parallel& parallel) {
  const auto* x = static_cast<const X*>(args.x);
  auto* values = static_cast<Value*>(args.values);
  const int64_t width = args.width, k = args.k, bytes = position_bytes(width, k);
  const int64_t tasks = std::min(parallel.threads, args.rows);
  std::vector<Scratch> scratch;
  for (int64_t task = 0; task < tasks; ++task) scratch.emplace_back(width, k);
  parallel.run(tasks, [&](int64_t task) {
    const Share mine = share(args.rows, tasks, task);
    Scratch& own = scratch[task];
    for (int64_t row = mine.begin; row < mine.end; row += kLanes) {
      const int64_t rows = std::min(kLanes, mine.end - row);
      const X* next = x + (row + rows) * width;
      const int64_t ahead = std::min(rows, mine.end - row - rows) * width;
      const float* floats = as_floats(x + row * width, rows, width, own);
      own.selector.select(floats, rows, kUnit<X>, next, ahead * int64_t{sizeof(X)});
      vectorise([&] {
        const float* kept = own.selector.kept();
        for (int64_t i = 0; i < rows * k; ++i) values[row * k + i] = round_to<Value>(kept[i]);
        write_positions(own, rows, width, k, args.positions + row * bytes);
      });
    }
  });
}

}  // namespace

void row_pack(const RowPackArgs& args, const Parallel& parallel) {
  dispatch(args.x_dtype, [&](auto x) {
    dispatch(args.value_dtype,
             [&](auto value) { pack_rows<decltype(x), decltype(value)>(args, parallel); });
  });
}

}  // namespace dct::cpu
