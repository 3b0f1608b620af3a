#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "../common/floats.h"
#include "../common/row_layout.h"
#include "bitmask.h"
#include "kernels.h"
#include "row_positions.h"
#include "row_select.h"
#include "simd_dispatch.h"

namespace dct::cpu {
namespace {

// Working memory of one task, for rows of `width` columns.
template <typename X>
struct Scratch {
  Scratch(int64_t width, int64_t k)
      : selector(width, k),
        flags(new uint8_t[64 * bitmask_words(width)]),
        bits(new uint64_t[bitmask_words(width)]) {}
  RowSelector<X> selector;
  std::unique_ptr<uint8_t[]> flags;  // for one row: 1 where a column is kept
  std::unique_ptr<uint64_t[]> bits;
};

template <typename X>
void write_positions(const Scratch<X>& scratch, int64_t rows, int64_t width, int64_t k,
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
  std::vector<Scratch<X>> scratch;
  scratch.reserve(tasks);
  for (int64_t task = 0; task < tasks; ++task) scratch.emplace_back(width, k);
  parallel.run(tasks, [&](int64_t task) {
    const Share span = share(args.rows, tasks, task);
    Scratch<X>& task_scratch = scratch[task];
    for (int64_t row = span.begin; row < span.end; row += kLanes) {
      const int64_t rows = std::min(kLanes, span.end - row);
      task_scratch.selector.select(x + row * width, rows, span.end - row - rows);
      vectorize([&] {
        const float* kept = task_scratch.selector.kept();
        for (int64_t i = 0; i < rows * k; ++i) values[row * k + i] = round_to<Value>(kept[i]);
        write_positions(task_scratch, rows, width, k, args.positions + row * bytes);
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
