#include "row_pack.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "../common/rounding.h"
#include "../common/rows.h"
#include "bitmask.h"
#include "kth_largest.h"
#include "row_positions.h"
#include "vectorise.h"

namespace dct::cpu {
namespace {

// One task's working memory, for rows of `width` columns.
struct Scratch {
  explicit Scratch(int64_t width)
      : keys(new int32_t[width]),
        flags(new uint8_t[64 * bitmask_words(width)]),
        bits(new uint64_t[bitmask_words(width)]) {}
  std::unique_ptr<int32_t[]> keys;
  std::unique_ptr<uint8_t[]> flags;  // 1 where a column is kept
  std::unique_ptr<uint64_t[]> bits;  // the same, packed
};

// Marks the k columns of largest magnitude; of equal ones the lower.
template <typename X>
void select_columns(const X* x, int64_t width, int64_t k, const Scratch& scratch) {
  int32_t* keys = scratch.keys.get();
  uint8_t* flags = scratch.flags.get();
  for (int64_t i = 0; i < width; ++i) keys[i] = magnitude_key(to_float(x[i]));
  const int32_t kth = kth_largest(keys, width, k);
  for (int64_t i = 0; i < width; ++i) flags[i] = keys[i] >= kth;
  int64_t kept = count_at_least(keys, width, kth);
  for (int64_t i = width - 1; kept > k; --i) {
    if (keys[i] == kth) {
      flags[i] = 0;
      --kept;
    }
  }
  pack_bits(flags, width, scratch.bits.get());
}

template <typename X, typename Value>
void emit_row(const X* x, int64_t width, PositionEncoding encoding, const uint64_t* bits,
              Value* values, uint8_t* positions) {
  int64_t slot = 0;
  for_each_bit(bits, bitmask_words(width), [&](int64_t column) {
    values[slot] = round_to<Value>(to_float(x[column]));
    if (encoding == PositionEncoding::kUint8) {
      positions[slot] = static_cast<uint8_t>(column);
    } else if (encoding == PositionEncoding::kUint16) {
      store_uint16(positions + 2 * slot, column);
    }
    ++slot;
  });
  if (encoding == PositionEncoding::kBitmap) std::memcpy(positions, bits, (width + 7) / 8);
}

template <typename X, typename Value>
void pack_rows(const RowPackArgs& args, const Parallel& parallel) {
  const auto* x = static_cast<const X*>(args.x);
  auto* values = static_cast<Value*>(args.values);
  const int64_t width = args.width, k = args.k, bytes = position_bytes(width, k);
  const PositionEncoding encoding = position_encoding(width, k);
  const int64_t tasks = std::min(parallel.threads, args.rows);
  std::vector<Scratch> scratch;
  for (int64_t task = 0; task < tasks; ++task) scratch.emplace_back(width);
  parallel.run(tasks, [&](int64_t task) {
    const Share mine = share(args.rows, tasks, task);
    const Scratch& own = scratch[task];
    vectorise([&] {
      for (int64_t row = mine.begin; row < mine.end; ++row) {
        select_columns(x + row * width, width, k, own);
        emit_row(x + row * width, width, encoding, own.bits.get(), values + row * k,
                 args.positions + row * bytes);
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
