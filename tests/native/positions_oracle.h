#pragma once

// Positions of packed rows, read column by column.

#include <vector>

#include "../../csrc/common/rows.h"

namespace dct::test {

// The column of each slot, -1 where none is accepted.
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

}  // namespace dct::test
