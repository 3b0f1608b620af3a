#pragma once

// Reads and writes the positions of one row in their three encodings. The bytes are not aligned.

#include <cstdint>
#include <cstring>

#include "../common/row_layout.h"
#include "bitmask.h"

namespace dct::cpu {

inline int64_t load_uint16(const uint8_t* bytes) {
  uint16_t value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

inline void store_uint16(uint8_t* bytes, int64_t value) {
  const auto narrow = static_cast<uint16_t>(value);
  std::memcpy(bytes, &narrow, sizeof(narrow));
}

// Calls function(slot, column) for every accepted slot of a row. A slot is accepted if its column
// is below `width` and above all columns accepted before. Positions are not trusted.
template <typename Function>
void for_each_position(const uint8_t* positions, PositionEncoding encoding, int64_t width,
                       int64_t k, Function&& function) {
  if (encoding == PositionEncoding::kBitmap) {
    int64_t slot = 0;
    for (int64_t column = 0; column < width && slot < k; column += 64) {
      const int64_t valid = width - column < 64 ? width - column : 64;
      uint64_t word = 0;
      std::memcpy(&word, positions + column / 8, (valid + 7) / 8);
      if (valid < 64) word &= (uint64_t{1} << valid) - 1;
      for (; word != 0 && slot < k; word &= word - 1) {
        function(slot++, column + __builtin_ctzll(word));
      }
    }
    return;
  }
  int64_t lowest = 0;  // the lowest column to accept next
  for (int64_t slot = 0; slot < k; ++slot) {
    const int64_t column =
        encoding == PositionEncoding::kUint8 ? positions[slot] : load_uint16(positions + 2 * slot);
    if (column < lowest || column >= width) continue;
    function(slot, column);
    lowest = column + 1;
  }
}

}  // namespace dct::cpu
