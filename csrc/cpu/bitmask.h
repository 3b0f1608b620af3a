#pragma once

#include <cstdint>
#include <cstring>

namespace dct::cpu {

constexpr int64_t bitmask_words(int64_t n) { return (n + 63) / 64; }

// Bit i of `bits` = flags[i], which is 0 or 1. The flags have room for whole words: the last one is
// filled up with zeros. Call it inside vectorise().
inline void pack_bits(uint8_t* flags, int64_t n, uint64_t* bits) {
  const int64_t words = bitmask_words(n);
  std::memset(flags + n, 0, words * 64 - n);
  for (int64_t w = 0; w < words; ++w) {
    uint64_t word = 0;
    for (int byte = 0; byte < 8; ++byte) {
      uint64_t eight;
      std::memcpy(&eight, flags + w * 64 + byte * 8, sizeof(eight));
      // Each of the eight 0/1 bytes is shifted to its own bit of the product's top byte.
      word |= ((eight * 0x0102040810204080u) >> 56) << (8 * byte);
    }
    bits[w] = word;
  }
}

// Calls function(i) for every set bit i, ascending.
template <typename Function>
void for_each_bit(const uint64_t* bits, int64_t words, Function&& function) {
  for (int64_t w = 0; w < words; ++w) {
    for (uint64_t word = bits[w]; word != 0; word &= word - 1) {
      function(w * 64 + __builtin_ctzll(word));
    }
  }
}

}  // namespace dct::cpu
