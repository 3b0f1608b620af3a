#pragma once

// Comparison and hashing of the 16-bit entries of weights. Compilers do not turn comparisons into
// bits, and they multiply numbers of 32 bits as numbers of 64 bits.

#include <cstdint>
#include <cstring>

#include "../common/patch.h"
#include "simd_dispatch.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace dct::cpu {

constexpr int64_t kCompared = 64;  // entries, and bits of a word

// The sum of the hashes of the groups in [begin, n) of a block. The last group may be incomplete.
inline uint64_t hash_groups(const uint16_t* x, int64_t begin, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = begin; i < n; i += kHashed) {
    uint64_t bits = 0;
    std::memcpy(&bits, x + i, 2 * (n - i < kHashed ? n - i : kHashed));
    sum += group_hash(bits, static_cast<uint32_t>(i / kHashed));
  }
  return sum;
}

// Without and with AVX2, with n a multiple of kCompared:
//
// `differ` sets bit i of `bits` to x[i] != y[i], for i < n. It also prefetches the entries that
// follow n entries later, because the memory would be idle while the changed entries are packed.
//
// `hash` returns the sum of the hashes of the first n entries of a block.
struct PlainPatch {
  static void differ(const uint16_t* x, const uint16_t* y, int64_t n, uint64_t* bits) {
    for (int64_t w = 0; w < n / kCompared; ++w) {
      uint64_t word = 0;
      for (int64_t i = 0; i < kCompared; ++i) {
        word |= uint64_t{x[w * kCompared + i] != y[w * kCompared + i]} << i;
      }
      bits[w] = word;
    }
  }
  static uint64_t hash(const uint16_t* x, int64_t n) { return hash_groups(x, 0, n); }
};

struct Avx2Patch;

#if defined(__x86_64__) && defined(__GNUC__)

inline void prefetch_strip(const uint16_t* x) {
  __builtin_prefetch(x);
  __builtin_prefetch(x + kCompared / 2);
}

struct Avx2Patch {
#define DCT_AVX2 __attribute__((target("avx2")))
  DCT_AVX2 static void differ(const uint16_t* x, const uint16_t* y, int64_t n, uint64_t* bits) {
    for (int64_t i = 0; i < n; i += kCompared) {
      prefetch_strip(x + i + n);
      prefetch_strip(y + i + n);
      const uint64_t low = equal(x + i, y + i), high = equal(x + i + 32, y + i + 32);
      bits[i / kCompared] = ~(low | high << 32);
    }
  }
  DCT_AVX2 static uint64_t hash(const uint16_t* x, int64_t n) {
    const __m256i first = _mm256_setr_epi32(1, 2, 3, 4, 5, 6, 7, 8);
    __m256i key = _mm256_mullo_epi32(first, _mm256_set1_epi32(static_cast<int>(kWordKey)));
    const __m256i step = _mm256_set1_epi32(static_cast<int>(8 * kWordKey));
    __m256i sum = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 16) {
      const __m256i words = _mm256_add_epi32(load(x + i), key);
      sum = _mm256_add_epi64(sum, _mm256_mul_epu32(words, _mm256_srli_epi64(words, 32)));
      key = _mm256_add_epi32(key, step);
    }
    uint64_t sums[4];
    std::memcpy(sums, &sum, sizeof(sums));
    return sums[0] + sums[1] + sums[2] + sums[3];
  }

 private:
  DCT_AVX2 static __m256i load(const uint16_t* x) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  }
  // Compares 32 entries.
  DCT_AVX2 static uint32_t equal(const uint16_t* x, const uint16_t* y) {
    const __m256i low = _mm256_cmpeq_epi16(load(x), load(y));
    const __m256i high = _mm256_cmpeq_epi16(load(x + 16), load(y + 16));
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
    return static_cast<uint32_t>(_mm256_movemask_epi8(bytes));
  }
#undef DCT_AVX2
};

#endif

// Calls loop(lanes). Vectors of 64 bytes are not faster, because these loops wait for memory.
template <typename Loop>
void vectorize_patch(const Loop& loop) {
  vectorize_by<PlainPatch, Avx2Patch, Avx2Patch>(loop);
}

// The sum of the hashes of a block of n entries. Call it inside vectorize_patch().
template <typename Lanes>
uint64_t hash_block(const uint16_t* x, int64_t n) {
  const int64_t whole = n / kCompared * kCompared;
  return Lanes::hash(x, whole) + hash_groups(x, whole, n);
}

}  // namespace dct::cpu
