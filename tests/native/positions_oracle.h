#pragma once

// Reference decoder of the positions of packed rows.

#include <vector>

#include "../../csrc/common/row_layout.h"
#include "support.h"

namespace dct::test {

// The column of each slot, or -1 if the slot is invalid.
inline std::vector<int64_t> columns_of(const uint8_t* positions, int64_t width, int64_t k) {
  std::vector<int64_t> columns(k, -1);
  const int64_t bytes = position_bytes(width, k), bitmap = (width + 7) / 8;
  if (bytes == bitmap) {
    int64_t slot = 0;
    for (int64_t c = 0; c < width; ++c) {
      if ((positions[c / 8] >> (c % 8) & 1) != 0 && slot < k) columns[slot++] = c;
    }
    return columns;
  }
  int64_t highest = -1;
  for (int64_t slot = 0; slot < k; ++slot) {
    const int64_t c =
        bytes == k ? positions[slot] : positions[2 * slot] + 256 * positions[2 * slot + 1];
    if (c < width && c > highest) columns[slot] = highest = c;
  }
  return columns;
}

// check_gathered checks the values [rows, k] of row_gather, and check_unpacked the rows
// [rows, width] of row_unpack. Positions may be invalid. Returns whether all slots are valid.
template <typename X, typename Value>
bool check_gathered(const X* x, const uint8_t* positions, int64_t rows, int64_t width, int64_t k,
                    const Value* values) {
  bool accepted = true;
  for (int64_t row = 0; row < rows; ++row, values += k, x += width) {
    const auto columns = columns_of(positions + row * position_bytes(width, k), width, k);
    for (int64_t slot = 0; slot < k; ++slot) {
      const int64_t c = columns[slot];
      accepted = accepted && c >= 0;
      CHECK(bits(values[slot]) == (c < 0 ? 0 : encode<Value>(value(x[c]))), "row %ld, slot %ld",
            long(row), long(slot));
    }
  }
  return accepted;
}

template <typename Value, typename Out>
bool check_unpacked(const Value* values, const uint8_t* positions, int64_t rows, int64_t width,
                    int64_t k, const Out* out) {
  bool accepted = true;
  for (int64_t row = 0; row < rows; ++row, values += k, out += width) {
    std::vector<uint32_t> wanted(width, 0);
    const auto columns = columns_of(positions + row * position_bytes(width, k), width, k);
    for (int64_t slot = 0; slot < k; ++slot) {
      accepted = accepted && columns[slot] >= 0;
      if (columns[slot] >= 0) wanted[columns[slot]] = encode<Out>(value(values[slot]));
    }
    for (int64_t c = 0; c < width; ++c) {
      CHECK(bits(out[c]) == wanted[c], "row %ld, column %ld", long(row), long(c));
    }
  }
  return accepted;
}

}  // namespace dct::test
