#include "row_pack.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "../common/rounding.h"
#include "../common/rows.h"
#include "bitmask.h"
#include "key_vectors.h"
#include "largest.h"
#include "prefetch.h"
#include "row_positions.h"
#include "vectorise.h"

namespace dct::cpu {
namespace {

// One task's working memory, for rows of `width` columns.
struct Scratch {
  explicit Scratch(int64_t width)
      : keys(new int32_t[padded_keys(width)]),
        bits(new uint64_t[bitmask_words(width)]),
        above(new uint64_t[bitmask_words(width)]),
        columns(new int32_t[width + kSpareIndices]) {
    std::fill(keys.get() + width, keys.get() + padded_keys(width), kNoKey);
  }
  std::unique_ptr<int32_t[]> keys;     // kNoKey past the width
  std::unique_ptr<uint64_t[]> bits;    // a bit for every column, set where it is kept
  std::unique_ptr<uint64_t[]> above;   // and where it is above what ties
  std::unique_ptr<int32_t[]> columns;  // the same, listed
};

// Of the columns that tie at the bound, drops the last `surplus`.
template <typename Keys>
void drop_ties(Keys, const Scratch& scratch, int64_t words, int32_t bound, int64_t surplus) {
  Keys::mark(scratch.keys.get(), words, bound + 1, scratch.above.get());
  for (int64_t w = words - 1; surplus > 0; --w) {
    uint64_t ties = scratch.bits[w] & ~scratch.above[w];
    for (; ties != 0 && surplus > 0; --surplus) {
      const uint64_t last = uint64_t{1} << (63 - __builtin_clzll(ties));
      scratch.bits[w] &= ~last;
      ties &= ~last;
    }
  }
}

// Marks and lists the k columns of largest magnitude; of equal ones the lower. Returns their least
// key: where to look `near` in the next row.
template <typename Keys, typename X>
int32_t select_columns(Keys how, const X* x, int64_t width, int64_t k, int32_t near,
                       const Scratch& scratch) {
  int32_t* keys = scratch.keys.get();
  const int64_t words = bitmask_words(width);
  for (int64_t i = 0; i < width; ++i) keys[i] = magnitude_key(to_float(x[i]));
  const Largest kept = largest(how, keys, width, k, near);
  Keys::mark(keys, words, kept.bound, scratch.bits.get());
  if (kept.count > k) drop_ties(how, scratch, words, kept.bound, kept.count - k);
  bit_indices(scratch.bits.get(), words, scratch.columns.get());
  return kept.bound;
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
    const Prefetch<X> prefetch(x, width, mine.end);
    vectorise_keys([&](auto how) {
      int32_t near = 0;
      for (int64_t row = mine.begin; row < mine.end; ++row) {
        prefetch.before(row);
        near = select_columns(how, x + row * width, width, k, near, own);
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
