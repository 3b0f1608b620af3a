#pragma once

// Unpacks rows with several codes per byte (layout: docs/reference/ops.md). There are at most 16
// different codes, so a lookup table in registers holds their entries. Compilers do not generate
// such lookups.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../common/row_layout.h"
#include "lanes.h"
#include "simd_dispatch.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace dct::cpu {

constexpr int64_t kCodeGroup = 32;  // columns

template <RowFormat kFormat>
float scale_of(const uint8_t* row, int64_t width) {
  BFloat16 scale;
  std::memcpy(&scale, row + code_bytes(width, kFormat), kScaleBytes);
  return to_float(scale);
}

// The index of an entry is its part of the byte: four bits (int4), a digit (ternary), a bit (sign).
constexpr int kMostEntries = 16;
constexpr int entries_of(RowFormat format) {
  switch (format) {
    case RowFormat::kInt4:
      return 16;
    case RowFormat::kTernary:
      return 3;
    case RowFormat::kSign:
      return 2;
    default:
      return 0;  // not looked up
  }
}
constexpr int code_at(int index, RowFormat format) {
  return format == RowFormat::kInt4      ? (index ^ 8) - 8
         : format == RowFormat::kTernary ? index - 1
                                         : 1 - 2 * index;
}
struct alignas(64) Entries {
  float of[kMostEntries];
};

// The values of the codes of a row, before multiplication by its scale.
template <RowFormat kFormat>
constexpr Entries kCodes = [] {
  Entries codes{};
  for (int i = 0; i < entries_of(kFormat); ++i) codes.of[i] = code_at(i, kFormat);
  return codes;
}();

// A ternary byte + 121 is a number below 243 with five digits in base 3; the first column is the
// lowest digit. Multiplied by 270, slightly more than 2^16 / 243, it becomes a fraction with
// denominator 2^16. For column i, multiplying by 3^(4 - i), modulo 2^16, drops the digits above
// the column's digit, which is then the integer part of three times the fraction.
constexpr uint32_t kTopNumber = 242;  // replaces larger numbers, which encode no codes
constexpr uint16_t kTritFactors[kTrits] = {270 * 81, 270 * 27, 270 * 9, 270 * 3, 270};

// Tables for each place that a group's first column can have in its byte. Among each 2 * kApart
// columns, columns i and i + kApart are adjacent 16-bit words, each of which becomes an index.
template <int kApart>
struct TritColumns {
  uint16_t byte[kTrits][kCodeGroup];  // the byte that holds the column, as shuffle indices
  uint16_t factor[kTrits][kCodeGroup];
};
template <int kApart>
constexpr TritColumns<kApart> kTritColumns = [] {
  TritColumns<kApart> columns{};
  for (int first = 0; first < kTrits; ++first) {
    for (int i = 0; i < kCodeGroup; ++i) {
      const int in_pair = i % (2 * kApart);
      const int at = first + i - in_pair + in_pair / 2 + in_pair % 2 * kApart;
      columns.byte[first][i] = static_cast<uint16_t>(0x8000 | at / kTrits);  // index 0x80 gives 0
      columns.factor[first][i] = kTritFactors[at % kTrits];
    }
  }
  return columns;
}();

// For each instruction set: `look_up` calls use(floats, i) with vectors of the entries of one group
// of columns, starting at the i-th column of the group. `look_up` reads nothing past the row if
// the group is whole.
struct PlainUnpack {
  static constexpr int kVectorBytes = 16;
  template <RowFormat kFormat, typename Use>
  static void look_up(const uint8_t* row, int64_t column, const Entries& entries, const Use& use) {
    constexpr int kCodesPerByte = codes_per_byte(kFormat), kBits = 8 / kCodesPerByte;
    const uint8_t* bytes = row + column / kCodesPerByte;
    const int64_t first = column % kCodesPerByte;
    for (int i = 0; i < kCodeGroup; i += 4) {
      Lanes<16>::Floats four;
      for (int j = 0; j < 4; ++j) {
        const uint32_t byte = bytes[(first + i + j) / kCodesPerByte];
        if constexpr (kFormat == RowFormat::kTernary) {
          const uint32_t number = std::min((byte + 121) & 255, kTopNumber);
          const uint32_t fraction = number * kTritFactors[(first + i + j) % kTrits] & 0xffff;
          four[j] = entries.of[fraction * 3 >> 16];
        } else {
          four[j] = entries.of[byte >> (i + j) % kCodesPerByte * kBits & ((1 << kBits) - 1)];
        }
      }
      use(four, i);
    }
  }
};

struct Avx2Unpack;
struct Avx512Unpack;

#if defined(__x86_64__) && defined(__GNUC__)

struct Avx2Unpack {
#define DCT_AVX2 __attribute__((target("avx2")))
  static constexpr int kVectorBytes = 32;
  template <RowFormat kFormat, typename Use>
  DCT_AVX2 static void look_up(const uint8_t* row, int64_t column, const Entries& entries,
                               const Use& use) {
    if constexpr (kFormat == RowFormat::kTernary) {
      // The low two bits of each 32 index a table of four.
      const __m256 table = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(entries.of));
      const __m256i numbers = numbers_of(row, column);
      const auto* byte = reinterpret_cast<const __m256i*>(kTritColumns<8>.byte[column % kTrits]);
      const auto* factor =
          reinterpret_cast<const __m256i*>(kTritColumns<8>.factor[column % kTrits]);
      for (int half = 0; half < 2; ++half) {
        const __m256i bytes = _mm256_shuffle_epi8(numbers, _mm256_loadu_si256(byte + half));
        const __m256i fractions = _mm256_mullo_epi16(bytes, _mm256_loadu_si256(factor + half));
        const __m256i digits = _mm256_mulhi_epu16(fractions, _mm256_set1_epi16(3));
        use(_mm256_permutevar_ps(table, digits), 16 * half);
        use(_mm256_permutevar_ps(table, _mm256_srli_epi32(digits, 16)), 16 * half + 8);
      }
    } else {
      // Each of eight codes is shifted to the low bits of its 32-bit lane.
      constexpr int kBits = 8 / codes_per_byte(kFormat);
      const __m256i shift =
          _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(kBits));
      for (int i = 0; i < kCodeGroup; i += 8) {
        int32_t eight = 0;
        std::memcpy(&eight, row + (column + i) / codes_per_byte(kFormat), kBits);
        const __m256i index = _mm256_srlv_epi32(_mm256_set1_epi32(eight), shift);
        if constexpr (kFormat == RowFormat::kInt4) {
          const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(entries.of), index);
          const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(entries.of + 8), index);
          use(_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28))), i);
        } else {  // a table of two entries, repeated
          const __m256 table =
              _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(entries.of)));
          use(_mm256_permutevar_ps(table, index), i);
        }
      }
    }
  }

 protected:
  // The numbers of the bytes of a ternary group and of the next byte, repeated in each 64 bits.
  DCT_AVX2 static __m256i numbers_of(const uint8_t* row, int64_t column) {
    int64_t eight;  // a whole group has at least seven bytes, and a scale follows it
    std::memcpy(&eight, row + column / kTrits, sizeof(eight));
    return _mm256_min_epu8(_mm256_add_epi8(_mm256_set1_epi64x(eight), _mm256_set1_epi8(121)),
                           _mm256_set1_epi8(static_cast<char>(kTopNumber)));
  }
#undef DCT_AVX2
};

struct Avx512Unpack : Avx2Unpack {
  static constexpr int kVectorBytes = 64;
  // The masks select all lanes. gcc 12 warns of an uninitialized value in the forms without a mask.
  template <RowFormat kFormat, typename Use>
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) static void look_up(
      const uint8_t* row, int64_t column, const Entries& entries, const Use& use) {
    constexpr __mmask16 kAll = 0xffff;
    const uint8_t* codes = row + column / codes_per_byte(kFormat);
    if constexpr (kFormat == RowFormat::kTernary) {  // as in Avx2Unpack
      const __m512 table = _mm512_maskz_broadcast_f32x4(kAll, _mm_load_ps(entries.of));
      const __m512i numbers = _mm512_maskz_broadcast_i64x4(0xff, numbers_of(row, column));
      const __m512i bytes =
          _mm512_shuffle_epi8(numbers, _mm512_loadu_si512(kTritColumns<16>.byte[column % kTrits]));
      const __m512i fractions =
          _mm512_mullo_epi16(bytes, _mm512_loadu_si512(kTritColumns<16>.factor[column % kTrits]));
      const __m512i digits = _mm512_mulhi_epu16(fractions, _mm512_set1_epi16(3));
      use(_mm512_maskz_permutevar_ps(kAll, table, digits), 0);
      use(_mm512_maskz_permutevar_ps(kAll, table, _mm512_maskz_srli_epi32(kAll, digits, 16)), 16);
    } else if constexpr (kFormat == RowFormat::kInt4) {
      // The halves of the bytes are looked up, then interleaved.
      const __m512 table = _mm512_load_ps(entries.of);
      const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
      const __m512i index = _mm512_maskz_cvtepu8_epi32(kAll, bytes);
      const __m512 even = _mm512_maskz_permutexvar_ps(kAll, index, table);
      const __m512 odd =
          _mm512_maskz_permutexvar_ps(kAll, _mm512_maskz_srli_epi32(kAll, index, 4), table);
      use(_mm512_permutex2var_ps(even, low, odd), 0);
      use(_mm512_permutex2var_ps(even, high, odd), 16);
    } else {
      uint32_t bits;
      std::memcpy(&bits, codes, sizeof(bits));
      const __m512 of_0 = _mm512_set1_ps(entries.of[0]), of_1 = _mm512_set1_ps(entries.of[1]);
      use(_mm512_mask_blend_ps(static_cast<__mmask16>(bits), of_0, of_1), 0);
      use(_mm512_mask_blend_ps(static_cast<__mmask16>(bits >> 16), of_0, of_1), 16);
    }
  }
};

#endif

// vectorize() for a loop that takes a PlainUnpack, Avx2Unpack or Avx512Unpack argument.
template <typename Loop>
void vectorize_unpacking(const Loop& loop) {
  vectorize_by<PlainUnpack, Avx2Unpack, Avx512Unpack>(loop);
}

}  // namespace dct::cpu
