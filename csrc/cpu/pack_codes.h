#pragma once

// Packs codes into the bytes of a row (layout: docs/reference/ops.md). Compilers do not generate
// the instructions that turn comparisons into bits and shuffle bytes.

#include <cmath>
#include <cstdint>

#include "../common/row_layout.h"
#include "simd_dispatch.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace dct::cpu {

constexpr int kStep = 16;  // columns

// The five codes of a ternary byte come from two bit planes. One marks the columns with code 1, the
// other marks the columns with code -1.
constexpr int64_t kTritBytes = 16;  // packed by one call, from 80 columns (10 bytes of a plane)
constexpr int64_t kTritPlane = 16;  // bytes that one call reads from each plane
struct TritFields {
  uint8_t value[32];             // for five bits: the sum of the bits times 1, 3, 9, 27, 81
  uint8_t byte[2 * kTritBytes];  // the two bytes of a plane that hold the bits of an output byte
  uint16_t factor[kTritBytes];   // shifts these bits to the top of the 16
};
constexpr TritFields kTritFields = [] {
  TritFields fields{};
  for (int bits = 0; bits < 32; ++bits) {
    for (int i = kTrits - 1; i >= 0; --i) {
      fields.value[bits] = static_cast<uint8_t>(3 * fields.value[bits] + (bits >> i & 1));
    }
  }
  for (int i = 0; i < kTritBytes; ++i) {
    fields.byte[2 * i] = static_cast<uint8_t>(kTrits * i / 8);
    fields.byte[2 * i + 1] = static_cast<uint8_t>(kTrits * i / 8 + 1);
    fields.factor[i] = static_cast<uint16_t>(1 << (16 - kTrits - kTrits * i % 8));
  }
  return fields;
}();

// For each instruction set there are several functions. Three take kStep columns: `negative`
// returns one bit per column, `codes` rounds to integers of 8 bits, and `nibbles` packs two of
// these per byte, the first one in the low half.
//
// `mark` compares 64 columns: bit i of `above` is
// x[i] * factor > bound, bit i of `below` is x[i] * factor < -bound. `bound` is not negative.
// `mark` truncates each magnitude |x[i] * factor| above the bound to an integer, and returns the
// sum of these integers. `pack_trits` packs two bit planes into kTritBytes bytes.
struct PlainPack {
  static uint32_t negative(const float* x) {
    uint32_t bits = 0;
    for (int i = 0; i < kStep; ++i) bits |= uint32_t{x[i] < 0} << i;
    return bits;
  }
  static void codes(const float* x, float inverse, uint8_t* out) {
    for (int i = 0; i < kStep; ++i) {
      out[i] = static_cast<uint8_t>(float_to_bits(x[i] * inverse + kRoundToInteger));
    }
  }
  static void nibbles(const uint8_t* codes, uint8_t* out) {
    for (int i = 0; i < kStep / 2; ++i) {
      out[i] = static_cast<uint8_t>((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
    }
  }
  static uint32_t mark(const float* x, float factor, float bound, uint64_t* above,
                       uint64_t* below) {
    uint32_t total = 0;
    *above = *below = 0;
    for (int i = 0; i < 64; ++i) {
      const float units = x[i] * factor;
      *above |= uint64_t{units > bound} << i;
      *below |= uint64_t{units < -bound} << i;
      total += std::fabs(units) > bound ? whole_units(std::fabs(units)) : 0;
    }
    return total;
  }
  static void pack_trits(const uint8_t* above, const uint8_t* below, uint8_t* out) {
    for (int i = 0; i < kTritBytes; ++i) {
      const int plus = kTritFields.value[field(above, i)];
      out[i] = static_cast<uint8_t>(plus - kTritFields.value[field(below, i)]);
    }
  }

 private:
  static int field(const uint8_t* plane, int i) {
    const int bits = plane[kTritFields.byte[2 * i]] | plane[kTritFields.byte[2 * i + 1]] << 8;
    return bits * kTritFields.factor[i] >> (16 - kTrits) & 31;
  }
};

struct Avx2Pack;
struct Avx512Pack;

#if defined(__x86_64__) && defined(__GNUC__)

struct Avx2Pack {
#define DCT_AVX2 __attribute__((target("avx2")))
  DCT_AVX2 static uint32_t negative(const float* x) {
    const __m256 zero = _mm256_setzero_ps();
    const __m256 low = _mm256_cmp_ps(_mm256_loadu_ps(x), zero, _CMP_LT_OQ);
    const __m256 high = _mm256_cmp_ps(_mm256_loadu_ps(x + 8), zero, _CMP_LT_OQ);
    return _mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8;
  }
  DCT_AVX2 static void codes(const float* x, float inverse, uint8_t* out) {
    const __m256i low = low_bytes(x, inverse), high = low_bytes(x + 8, inverse);
    const __m256i words = _mm256_packus_epi32(low, high);  // four of each, in either half
    const __m256i bytes = _mm256_packus_epi16(words, words);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(bytes, order)));
  }
  DCT_AVX2 static void nibbles(const uint8_t* codes, uint8_t* out) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
    const __m128i pairs = _mm_maddubs_epi16(low, _mm_set1_epi16(0x1001));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(pairs, pairs));
  }
  DCT_AVX2 static uint32_t mark(const float* x, float factor, float bound, uint64_t* above,
                                uint64_t* below) {
    const __m256 factors = _mm256_set1_ps(factor), bounds = _mm256_set1_ps(bound);
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256i total = _mm256_setzero_si256();
    uint64_t kept = 0, negative = 0;
    for (int i = 0; i < 8; ++i) {
      const __m256 eight = _mm256_loadu_ps(x + 8 * i);
      const __m256 units = _mm256_mul_ps(_mm256_andnot_ps(sign, eight), factors);
      const __m256 keep = _mm256_cmp_ps(units, bounds, _CMP_GT_OQ);
      kept |= uint64_t(uint32_t(_mm256_movemask_ps(keep))) << (8 * i);
      negative |= uint64_t(uint32_t(_mm256_movemask_ps(eight))) << (8 * i);
      const __m256i whole = _mm256_cvttps_epi32(_mm256_and_ps(units, keep));
      total = _mm256_add_epi32(total, whole);
    }
    *above = kept & ~negative;
    *below = kept & negative;
    return sum_of(total);
  }
  DCT_AVX2 static void pack_trits(const uint8_t* above, const uint8_t* below, uint8_t* out) {
    const __m256i sums = _mm256_sub_epi16(trit_sums(above), trit_sums(below));
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(sums, sums), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(bytes));
  }

 protected:
  DCT_AVX2 static uint32_t sum_of(__m256i eight) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_srli_epi64(sum, 32)));
  }

 private:
  DCT_AVX2 static __m256i low_bytes(const float* x, float inverse) {
    const __m256 products = _mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(inverse));
    const __m256 shifted = _mm256_add_ps(products, _mm256_set1_ps(kRoundToInteger));
    return _mm256_and_si256(_mm256_castps_si256(shifted), _mm256_set1_epi32(255));
  }
  // 16 sums of five bits times 1, 3, 9, 27, 81, in 16 bits each.
  DCT_AVX2 static __m256i trit_sums(const uint8_t* plane) {
    const __m256i bits =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(plane)));
    const __m256i both = _mm256_shuffle_epi8(
        bits, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kTritFields.byte)));
    const __m256i fields = _mm256_srli_epi16(
        _mm256_mullo_epi16(
            both, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kTritFields.factor))),
        16 - kTrits);
    const __m256i values = _mm256_broadcastsi128_si256(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(kTritFields.value)));
    const __m256i fifth =
        _mm256_and_si256(_mm256_cmpgt_epi16(fields, _mm256_set1_epi16(15)), _mm256_set1_epi16(81));
    return _mm256_add_epi16(_mm256_shuffle_epi8(values, fields), fifth);
  }
#undef DCT_AVX2
};

struct Avx512Pack : Avx2Pack {
#define DCT_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
  DCT_AVX512 static uint32_t negative(const float* x) {
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(x), _mm512_setzero_ps(), _CMP_LT_OQ);
  }
  DCT_AVX512 static void codes(const float* x, float inverse, uint8_t* out) {
    const __m512 products = _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(inverse));
    const __m512 shifted = _mm512_add_ps(products, _mm512_set1_ps(kRoundToInteger));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm512_maskz_cvtepi32_epi8(0xffff, _mm512_castps_si512(shifted)));
  }
  DCT_AVX512 static uint32_t mark(const float* x, float factor, float bound, uint64_t* above,
                                  uint64_t* below) {
    const __m512 factors = _mm512_set1_ps(factor);
    __m512i total = _mm512_setzero_si512();
    *above = *below = 0;
    for (int i = 0; i < 4; ++i) {
      const __m512 units = _mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), factors);
      const __mmask16 plus = _mm512_cmp_ps_mask(units, _mm512_set1_ps(bound), _CMP_GT_OQ);
      const __mmask16 minus = _mm512_cmp_ps_mask(units, _mm512_set1_ps(-bound), _CMP_LT_OQ);
      *above |= uint64_t{plus} << 16 * i;
      *below |= uint64_t{minus} << 16 * i;
      const __m512i whole = _mm512_maskz_cvttps_epi32(plus | minus, units);
      total = _mm512_add_epi32(total, _mm512_maskz_abs_epi32(0xffff, whole));
    }
    return sum_of(_mm256_add_epi32(_mm512_maskz_extracti64x4_epi64(0xf, total, 0),
                                   _mm512_maskz_extracti64x4_epi64(0xf, total, 1)));
  }
#undef DCT_AVX512
};

#endif

// vectorize() for a loop that takes a PlainPack, Avx2Pack or Avx512Pack argument.
template <typename Loop>
void vectorize_packing(const Loop& loop) {
  vectorize_by<PlainPack, Avx2Pack, Avx512Pack>(loop);
}

}  // namespace dct::cpu
