#include "row_pack.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "../common/rounding.h"
#include "../common/rows.h"
#include "bitmask.h"
#include "largest.h"
#include "row_positions.h"
#include "vectorise.h"

namespace dct::cpu {
namespace {

// One task's working memory, for rows of `width` columns.
struct Scratch {
  explicit Scratch(int64_t width)
      : keys(new int32_t[padded_keys(width)]),
        flags(new uint8_t[64 * bitmask_words(width)]),
        bits(new uint64_t[bitmask_words(width)]),
        columns(new int32_t[width + kSpareIndices]) {
    std::fill(keys.get() + width, keys.get() + padded_keys(width), kNoKey);
  }
  std::unique_ptr<int32_t[]> keys;     // kNoKey past the width
  std::unique_ptr<uint8_t[]> flags;    // 1 where a column is kept
  std::unique_ptr<uint64_t[]> bits;    // the same, packed
  std::unique_ptr<int32_t[]> columns;  // the same, listed
};

// Marks the k columns of largest magnitude; of equal ones the lower.
template <typename X>
void select_columns(const X* x, int64_t width, int64_t k, const Scratch& scratch) {
  int32_t* keys = scratch.keys.get();
  uint8_t* flags = scratch.flags.get();
  for (int64_t i = 0; i < width; ++i) keys[i] = magnitude_key(to_float(x[i]));
  const Largest kept = largest(keys, width, k);
  for (int64_t i = 0; i < width; ++i) flags[i] = keys[i] >= kept.bound;
  int64_t surplus = kept.count - k;
  for (int64_t i = width - 1; surplus > 0; --i) {
    if (keys[i] == kept.bound) {
      flags[i] = 0;
      --surplus;
    }
  }
  pack_bits(flags, width, scratch.bits.get());
  bit_indices(scratch.bits.get(), bitmask_words(width), scratch.columns.get());
}

template <typename X, typename Value>
void emit_row(const X* x, int64_t width, int64_t k, const Scratch& scratch, Value* values,
              uint8_t* positions) {
  const int32_t* columns = scratch.columns.get();
  for (int64_t slot = 0; slot < k; ++slot) {
    values[slot] = round_to<Value>(to_float(x[columns[slot]]));
  }
  switch (position_encoding(width, k)) {
    case PositionEncoding::kBitmap:
      std::memcpy(positions, scratch.bits.get(), (width + 7) / 8);
      break;
    case PositionEncoding::kUint8:
      for (int64_t slot = 0; slot < k; ++slot)
        positions[slot] = static_cast<uint8_t>(columns[slot]);
      break;
    case PositionEncoding::kUint16:
      for (int64_t slot = 0; slot < k; ++slot) store_uint16(positions + 2 * slot, columns[slot]);
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
  for (int64_t task = 0; task < tasks; ++task) scratch.emplace_back(width);
  parallel.run(tasks, [&](int64_t task) {
    const Share mine = share(args.rows, tasks, task);
    const Scratch& own = scratch[task];
    vectorise([&] {
      for (int64_t row = mine.begin; row < mine.end; ++row) {
        select_columns(x + row * width, width, k, own);
        emit_row(x + row * width, width, k, own, values + row * k, args.positions + row * bytes);
      }
    });
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
