#pragma once

// Steps of row_pack that compilers do not vectorize: compaction of the entries that reach a bound,
// and a transpose that assigns each row to a lane.

#include <cstdint>

#include "../common/floats.h"
#include "simd_dispatch.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace dct::cpu {

constexpr int64_t kLanes = 16;

struct Lanes {
  alignas(64) int32_t at[kLanes];
};

// For each instruction set:
//
// `list` copies, in order, the entries that reach a bound >= 0, and their columns. It returns the
// number of copied entries. The n entries are padded with 0.0 to whole vectors, and the padding may
// also be copied. The output needs space for kLanes entries more than are copied.
//
// `turn` transposes. For j < n, keys[j][lane] becomes the magnitude of entry j of the lane's row,
// or 0 past the row's count. The function may also read entries and write keys past n, up to the
// next multiple of kLanes.
//
// `reach` counts, per lane, the keys that are >= the lane's bound.
struct PlainRows {
  static int64_t list(const float* x, const int32_t* columns, int64_t n, int32_t bound, float* kept,
                      int32_t* kept_columns) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
      kept[count] = x[i];
      kept_columns[count] = columns[i];
      count += magnitude_bits(x[i]) >= bound;
    }
    return count;
  }
  static void turn(const float* rows, int64_t stride, const Lanes& counts, int64_t n,
                   int32_t* keys) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const bool there = j < counts.at[lane];
        keys[kLanes * j + lane] = there ? magnitude_bits(rows[lane * stride + j]) : 0;
      }
    }
  }
  static void reach(const int32_t* keys, int64_t n, const Lanes& bound, Lanes& count) {
    Lanes below, total;
    for (int l = 0; l < kLanes; ++l) {
      below.at[l] = bound.at[l] - 1;
      total.at[l] = 0;
    }
    for (int64_t j = 0; j < n; ++j) {
      for (int l = 0; l < kLanes; ++l) total.at[l] += keys[kLanes * j + l] > below.at[l];
    }
    count = total;
  }
};

struct Avx2Rows;
struct Avx512Rows;

#if defined(__x86_64__) && defined(__GNUC__)

// For each byte value, the indices of its set bits, one per byte of a word.
struct SetBits {
  constexpr SetBits() : of() {
    for (int byte = 0; byte < 256; ++byte) {
      int n = 0;
      for (int bit = 0; bit < 8; ++bit) {
        if ((byte >> bit & 1) != 0) of[byte] |= uint64_t(bit) << (8 * n++);
      }
    }
  }
  uint64_t of[256];
};
inline constexpr SetBits kSetBits;

// Moves the lanes whose bits are set to the front, in order. The other lanes are unspecified.
__attribute__((target("avx2"))) inline __m256i compress(__m256i lanes, uint32_t mask) {
  const __m256i from = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(kSetBits.of[mask]));
  return _mm256_permutevar8x32_epi32(lanes, from);
}

struct Avx2Rows : PlainRows {
#define DCT_AVX2 __attribute__((target("avx2")))
  DCT_AVX2 static int64_t list(const float* x, const int32_t* columns, int64_t n, int32_t bound,
                               float* kept, int32_t* kept_columns) {
    const __m256i below = _mm256_set1_epi32(bound - 1), magnitude = _mm256_set1_epi32(0x7fffffff);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 8) {
      const __m256i entries = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
      const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(columns + i));
      const __m256i reach = _mm256_cmpgt_epi32(_mm256_and_si256(entries, magnitude), below);
      const uint32_t mask = _mm256_movemask_ps(_mm256_castsi256_ps(reach));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(kept + count), compress(entries, mask));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(kept_columns + count), compress(c, mask));
      count += __builtin_popcount(mask);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(kept + count), _mm256_setzero_si256());
    return count;
  }
  DCT_AVX2 static void turn(const float* rows, int64_t stride, const Lanes& counts, int64_t n,
                            int32_t* keys) {
    const __m256i iota = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    for (int64_t j = 0; j < n; j += 8) {
      for (int64_t half = 0; half < kLanes; half += 8) {
        __m256i a[8], b[8];
        for (int r = 0; r < 8; ++r) {
          const float* row = rows + (half + r) * stride + j;
          const __m256i there = _mm256_cmpgt_epi32(
              _mm256_set1_epi32(counts.at[half + r] - static_cast<int32_t>(j)), iota);
          a[r] = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)),
                                  _mm256_and_si256(there, magnitude));
        }
        for (int r = 0; r < 8; r += 2) {
          b[r] = _mm256_unpacklo_epi32(a[r], a[r + 1]);
          b[r + 1] = _mm256_unpackhi_epi32(a[r], a[r + 1]);
        }
        for (int r = 0; r < 8; r += 4) {
          a[r] = _mm256_unpacklo_epi64(b[r], b[r + 2]);
          a[r + 1] = _mm256_unpackhi_epi64(b[r], b[r + 2]);
          a[r + 2] = _mm256_unpacklo_epi64(b[r + 1], b[r + 3]);
          a[r + 3] = _mm256_unpackhi_epi64(b[r + 1], b[r + 3]);
        }
        for (int r = 0; r < 4; ++r) {
          auto* to = reinterpret_cast<__m256i*>(keys + kLanes * (j + r) + half);
          _mm256_storeu_si256(to, _mm256_permute2x128_si256(a[r], a[r + 4], 0x20));
          _mm256_storeu_si256(to + 8, _mm256_permute2x128_si256(a[r], a[r + 4], 0x31));
        }
      }
    }
  }
#undef DCT_AVX2
};

struct Avx512Rows {
#define DCT_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
  DCT_AVX512 static int64_t list(const float* x, const int32_t* columns, int64_t n, int32_t bound,
                                 float* kept, int32_t* kept_columns) {
    const __m512i least = _mm512_set1_epi32(bound), magnitude = _mm512_set1_epi32(0x7fffffff);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += kLanes) {
      const __m512i entries = _mm512_loadu_si512(x + i);
      const __mmask16 reach = _mm512_cmpge_epi32_mask(_mm512_and_si512(entries, magnitude), least);
      _mm512_storeu_si512(kept + count, _mm512_maskz_compress_epi32(reach, entries));
      _mm512_storeu_si512(kept_columns + count,
                          _mm512_maskz_compress_epi32(reach, _mm512_loadu_si512(columns + i)));
      count += __builtin_popcount(reach);
    }
    _mm512_storeu_si512(kept + count, _mm512_setzero_si512());
    return count;
  }
  DCT_AVX512 static void turn(const float* rows, int64_t stride, const Lanes& counts, int64_t n,
                              int32_t* keys) {
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int64_t j = 0; j < n; j += kLanes) {
      __m512i a[kLanes], b[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        const __m512i left = _mm512_set1_epi32(counts.at[r] - static_cast<int32_t>(j));
        a[r] = _mm512_maskz_and_epi32(_mm512_cmpgt_epi32_mask(left, iota), magnitude,
                                      _mm512_loadu_si512(rows + r * stride + j));
      }
      // Interleaving rows r and r + 8 four times transposes the tile.
      for (int round = 0; round < 2; ++round) {
        for (int r = 0; r < 8; ++r) {
          b[2 * r] = _mm512_permutex2var_epi32(a[r], low, a[r + 8]);
          b[2 * r + 1] = _mm512_permutex2var_epi32(a[r], high, a[r + 8]);
        }
        for (int r = 0; r < 8; ++r) {
          a[2 * r] = _mm512_permutex2var_epi32(b[r], low, b[r + 8]);
          a[2 * r + 1] = _mm512_permutex2var_epi32(b[r], high, b[r + 8]);
        }
      }
      for (int r = 0; r < kLanes; ++r) _mm512_storeu_si512(keys + kLanes * (j + r), a[r]);
    }
  }
  DCT_AVX512 static void reach(const int32_t* keys, int64_t n, const Lanes& bound, Lanes& count) {
    const __m512i least = _mm512_load_si512(bound.at), minus_one = _mm512_set1_epi32(-1);
    __m512i total = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int64_t j = 0; j < n; ++j) {
      const __mmask16 mask = _mm512_cmple_epi32_mask(least, _mm512_loadu_si512(keys + kLanes * j));
      total = _mm512_mask_sub_epi32(total, mask, total, minus_one);
    }
    _mm512_store_si512(count.at, total);
  }
#undef DCT_AVX512
};

#endif

// vectorize() for a loop that takes a PlainRows, Avx2Rows or Avx512Rows argument.
template <typename Loop>
void vectorize_rows(const Loop& loop) {
  vectorize_by<PlainRows, Avx2Rows, Avx512Rows>(loop);
}

}  // namespace dct::cpu
