#pragma once

// Counting and compacting the keys >= a bound. Compilers vectorize the count with a long reduction,
// which is slow for few keys, and the compaction not at all.

#include <cstdint>

#include "compress.h"
#include "simd_dispatch.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace dct::cpu {

constexpr int64_t kKeyGroup = 64;  // keys come in whole groups, see kth_largest.h

// For each instruction set: `count` returns how many keys of some groups are >= bound, which is
// >= 0; `keep` compacts these in place, in order, and leaves the rest unspecified.
struct PlainKeys {
  static int64_t count(const int32_t* keys, int64_t groups, int32_t bound) {
    int64_t total = 0;
    for (int64_t g = 0; g < groups; ++g) {
      int32_t count = 0;  // as wide as the keys, for equal vector lanes
      for (int i = 0; i < kKeyGroup; ++i) count += keys[kKeyGroup * g + i] >= bound;
      total += count;
    }
    return total;
  }
  static int64_t keep(int32_t* keys, int64_t groups, int32_t bound) {
    int64_t count = 0;
    for (int64_t i = 0; i < kKeyGroup * groups; ++i) {
      const int32_t key = keys[i];
      keys[count] = key;
      count += key >= bound;
    }
    return count;
  }
};

struct Avx2Keys;
struct Avx512Keys;

#if defined(__x86_64__) && defined(__GNUC__)

struct Avx2Keys {
#define DCT_AVX2 __attribute__((target("avx2")))
  DCT_AVX2 static int64_t count(const int32_t* keys, int64_t groups, int32_t bound) {
    const __m256i below = _mm256_set1_epi32(bound - 1);
    // Each less than 2^31, for up to 2^34 keys. Two accumulators, to hide the latency of additions.
    __m256i counts[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int64_t i = 0; i < 8 * groups; i += 2) {
      for (int j = 0; j < 2; ++j) {
        const __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys) + i + j);
        counts[j] = _mm256_sub_epi32(counts[j], _mm256_cmpgt_epi32(eight, below));
      }
    }
    const __m256i sum = _mm256_add_epi32(counts[0], counts[1]);
    const __m256i pairs = _mm256_hadd_epi32(sum, sum);
    const __m256i halves = _mm256_hadd_epi32(pairs, pairs);
    return int64_t{_mm256_extract_epi32(halves, 0)} + _mm256_extract_epi32(halves, 4);
  }
  DCT_AVX2 static int64_t keep(int32_t* keys, int64_t groups, int32_t bound) {
    const __m256i below = _mm256_set1_epi32(bound - 1);
    int64_t count = 0;
    for (int64_t i = 0; i < kKeyGroup * groups; i += 8) {
      const __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i));
      const __m256i reach = _mm256_cmpgt_epi32(eight, below);
      const uint32_t mask = _mm256_movemask_ps(_mm256_castsi256_ps(reach));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(keys + count), compress(eight, mask));
      count += __builtin_popcount(mask);
    }
    return count;
  }
#undef DCT_AVX2
};

struct Avx512Keys {
#define DCT_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
  DCT_AVX512 static uint64_t group(const int32_t* keys, __m512i least) {
    uint64_t word = 0;
    for (int i = 0; i < 4; ++i) {
      const __m512i sixteen = _mm512_loadu_si512(keys + 16 * i);
      word |= uint64_t{_mm512_cmpge_epi32_mask(sixteen, least)} << (16 * i);
    }
    return word;
  }
  DCT_AVX512 static int64_t count(const int32_t* keys, int64_t groups, int32_t bound) {
    const __m512i least = _mm512_set1_epi32(bound);
    int64_t total = 0;
    for (int64_t g = 0; g < groups; ++g) {
      total += __builtin_popcountll(group(keys + kKeyGroup * g, least));
    }
    return total;
  }
  DCT_AVX512 static int64_t keep(int32_t* keys, int64_t groups, int32_t bound) {
    const __m512i least = _mm512_set1_epi32(bound);
    int64_t count = 0;
    for (int64_t i = 0; i < kKeyGroup * groups; i += 16) {
      const __m512i sixteen = _mm512_loadu_si512(keys + i);
      const __mmask16 reach = _mm512_cmpge_epi32_mask(sixteen, least);
      _mm512_storeu_si512(keys + count, _mm512_maskz_compress_epi32(reach, sixteen));
      count += __builtin_popcount(reach);
    }
    return count;
  }
#undef DCT_AVX512
};

#endif

// vectorize() for a loop that takes PlainKeys, Avx2Keys or Avx512Keys.
template <typename Loop>
void vectorize_keys(const Loop& loop) {
  vectorize_by<PlainKeys, Avx2Keys, Avx512Keys>(loop);
}

}  // namespace dct::cpu
