#pragma once

#include <cstdint>
#include <cstring>

namespace dct::cpu {

constexpr int64_t bitmask_words(int64_t n) { return (n + 63) / 64; }

constexpr int64_t kSpareIndices = 4;  // see bit_indices

// Sets bit i of `bits` to flags[i], which is 0 or 1. `flags` must have space for whole words of 64
// flags. The function sets the flags after the first n to 0. Call it inside vectorize().
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

// Writes the indices of all set bits in ascending order and returns their number. A loop over the
// bits of a word would mispredict once per word, because their number is unpredictable. So the
// function writes at least four indices per word, and the indices of the next word overwrite the
// excess. `indices` needs space for kSpareIndices more indices than there are set bits. Call it
// inside vectorize().
template <typename Index>
int64_t bit_indices(const uint64_t* bits, int64_t words, Index* indices) {
  constexpr uint64_t kLast = uint64_t{1} << 63;  // a bit for ctz to find in an empty word
  int64_t n = 0;
  for (int64_t w = 0; w < words; ++w) {
    uint64_t word = bits[w];
    const int64_t count = __builtin_popcountll(word);
    for (int64_t i = 0; i < kSpareIndices; ++i, word &= word - 1) {
      indices[n + i] = static_cast<Index>(w * 64 + __builtin_ctzll(word | kLast));
    }
    for (int64_t i = kSpareIndices; i < count; ++i, word &= word - 1) {
      indices[n + i] = static_cast<Index>(w * 64 + __builtin_ctzll(word));
    }
    n += count;
  }
  return n;
}

}  // namespace dct::cpu
