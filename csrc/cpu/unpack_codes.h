#pragma once

// Unpacking of rows with several codes per byte (layout: docs/reference/ops.md). A code has at most
// 16 values, so entries come from a lookup table in registers, which compilers do not generate.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../common/row_layout.h"
#include "simd_dispatch.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace dct::cpu {

constexpr int64_t kCodeGroup = 32;  // columns

// An entry's index is what lies in the byte: int4's four bits, ternary's digit, sign's bit.
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
template <typename Out>
struct alignas(64) Entries {
  Out of[kMostEntries];
};

// What a row's codes stand for, before its scale.
template <RowFormat kFormat>
constexpr Entries<float> kCodes = [] {
  Entries<float> codes{};
  for (int i = 0; i < entries_of(kFormat); ++i) codes.of[i] = code_at(i, kFormat);
  return codes;
}();

// A ternary byte + 121 is a number below 243 of five digits to the base of 3, the first column's
// the lowest. As a fraction of 2^16 it is multiplied by 270, a little more than 2^16 / 243; by 3
// to the right power, modulo 2^16, a column's digit is the next to come over the point.
constexpr uint32_t kTopNumber = 242;  // as which bytes read that no codes add up to
struct TritColumns {
  uint16_t byte[kCodeGroup + kTrits - 1];  // that holds the column, for the shuffle into 16 bits
  uint16_t factor[kCodeGroup + kTrits - 1];
};
// Of a group that begins at a byte's first column; others begin up to four columns further on.
constexpr TritColumns kTritColumns = [] {
  constexpr uint16_t kFactors[kTrits] = {270 * 81, 270 * 27, 270 * 9, 270 * 3, 270};
  TritColumns columns{};
  for (int i = 0; i < kCodeGroup + kTrits - 1; ++i) {
    columns.byte[i] = static_cast<uint16_t>(0x8000 | i / kTrits);  // index 0x80 gives 0
    columns.factor[i] = kFactors[i % kTrits];
  }
  return columns;
}();

// For each instruction set: `look_up` gives the entries of one group of a row's columns. It reads
// no further than the row if the group is whole.
struct PlainUnpack {
  static constexpr int kVectorBytes = 16;
  template <RowFormat kFormat, typename Out>
  static void look_up(const uint8_t* row, int64_t column, const Entries<Out>& entries, Out* out) {
    constexpr int kCodesPerByte = codes_per_byte(kFormat), kBits = 8 / kCodesPerByte;
    const uint8_t* bytes = row + column / kCodesPerByte;
    const int64_t first = column % kCodesPerByte;
    for (int64_t i = 0; i < kCodeGroup; ++i) {
      if constexpr (kFormat == RowFormat::kTernary) {
        const uint32_t byte = bytes[kTritColumns.byte[first + i] & 255];
        const uint32_t number = std::min((byte + 121) & 255, kTopNumber);
        const uint32_t fraction = number * kTritColumns.factor[first + i] & 0xffff;
        out[i] = entries.of[fraction * 3 >> 16];
      } else {
        out[i] =
            entries.of[bytes[i / kCodesPerByte] >> i % kCodesPerByte * kBits & ((1 << kBits) - 1)];
      }
    }
  }
};

struct Avx2Unpack;
struct Avx512Unpack;

#if defined(__x86_64__) && defined(__GNUC__)

struct Avx2Unpack {
#define DCT_AVX2 __attribute__((target("avx2")))
  static constexpr int kVectorBytes = 32;
  template <RowFormat kFormat, typename Out>
  DCT_AVX2 static void look_up(const uint8_t* row, int64_t column, const Entries<Out>& entries,
                               Out* out) {
    const __m256i group = indices<kFormat>(row, column);
    const auto* table = reinterpret_cast<const __m256i*>(&entries);
    auto* to = reinterpret_cast<__m256i*>(out);
    if constexpr (sizeof(Out) == 4) {
      const __m128i half[] = {_mm256_castsi256_si128(group), _mm256_extracti128_si256(group, 1)};
      for (int i = 0; i < 4; ++i) {
        const __m128i eight = i % 2 == 0 ? half[i / 2] : _mm_srli_si128(half[i / 2], 8);
        const __m256i index = _mm256_cvtepu8_epi32(eight);
        __m256i found = _mm256_permutevar8x32_epi32(_mm256_load_si256(table), index);
        if constexpr (kFormat == RowFormat::kInt4) {
          const __m256i upper = _mm256_permutevar8x32_epi32(_mm256_load_si256(table + 1), index);
          const __m256i is_upper = _mm256_cmpgt_epi32(index, _mm256_set1_epi32(7));
          found = _mm256_blendv_epi8(found, upper, is_upper);
        }
        _mm256_storeu_si256(to + i, found);
      }
    } else {
      // Low and high bytes are looked up on their own.
      const __m256i words = _mm256_load_si256(table);
      const __m256i low = bytes_of(_mm256_and_si256(words, _mm256_set1_epi16(255)));
      const __m256i high = bytes_of(_mm256_srli_epi16(words, 8));
      const __m256i lows = _mm256_shuffle_epi8(low, group);
      const __m256i highs = _mm256_shuffle_epi8(high, group);
      const __m256i even = _mm256_unpacklo_epi8(lows, highs);  // the first 8 columns of each 16
      const __m256i odd = _mm256_unpackhi_epi8(lows, highs);
      _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
      _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
    }
  }

 protected:
  // Of the entries of 32 columns.
  template <RowFormat kFormat>
  DCT_AVX2 static __m256i indices(const uint8_t* row, int64_t column) {
    const uint8_t* bytes = row + column / codes_per_byte(kFormat);
    if constexpr (kFormat == RowFormat::kInt4) {
      const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
      const __m256i words = _mm256_cvtepu8_epi16(pairs);
      const __m256i both = _mm256_or_si256(words, _mm256_slli_epi16(words, 4));
      return _mm256_and_si256(both, _mm256_set1_epi8(15));
    } else if constexpr (kFormat == RowFormat::kSign) {
      int32_t bits;
      std::memcpy(&bits, bytes, sizeof(bits));
      const __m256i byte_of =
          _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
      const __m256i bit_of = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
      const __m256i eights = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte_of);
      const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(eights, bit_of), bit_of);
      return _mm256_and_si256(set, _mm256_set1_epi8(1));
    } else {
      int64_t eight;  // a whole group has at least seven, and a scale follows
      std::memcpy(&eight, bytes, sizeof(eight));
      const __m256i numbers =
          _mm256_min_epu8(_mm256_add_epi8(_mm256_set1_epi64x(eight), _mm256_set1_epi8(121)),
                          _mm256_set1_epi8(static_cast<char>(kTopNumber)));
      const int64_t first = column % kTrits;
      const __m256i mixed =
          _mm256_packus_epi16(digits(numbers, first), digits(numbers, first + 16));
      return _mm256_permute4x64_epi64(mixed, 0xd8);
    }
  }

 private:
  // The digits of 16 columns, in 16 bits each.
  DCT_AVX2 static __m256i digits(__m256i numbers, int64_t first) {
    const __m256i index =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kTritColumns.byte + first));
    const __m256i factors =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kTritColumns.factor + first));
    const __m256i fractions = _mm256_mullo_epi16(_mm256_shuffle_epi8(numbers, index), factors);
    return _mm256_mulhi_epu16(fractions, _mm256_set1_epi16(3));
  }
  // Of 16 words below 256, twice.
  DCT_AVX2 static __m256i bytes_of(__m256i words) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0x88);
  }
#undef DCT_AVX2
};

struct Avx512Unpack : Avx2Unpack {
  static constexpr int kVectorBytes = 64;
  template <RowFormat kFormat, typename Out>
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) static void look_up(
      const uint8_t* row, int64_t column, const Entries<Out>& entries, Out* out) {
    // With masks of all lanes: gcc 12 warns of a value not set in the forms without.
    const __m256i group = indices<kFormat>(row, column);
    if constexpr (sizeof(Out) == 4) {
      const __m512i table = _mm512_load_si512(&entries);
      const __m512i first = _mm512_maskz_cvtepu8_epi32(0xffff, _mm256_castsi256_si128(group));
      const __m512i second = _mm512_maskz_cvtepu8_epi32(0xffff, _mm256_extracti128_si256(group, 1));
      _mm512_storeu_si512(out, _mm512_maskz_permutexvar_epi32(0xffff, first, table));
      _mm512_storeu_si512(out + 16, _mm512_maskz_permutexvar_epi32(0xffff, second, table));
    } else {
      const auto* words = reinterpret_cast<const __m256i*>(&entries);
      const __m512i table = _mm512_castsi256_si512(_mm256_load_si256(words));
      const __m512i index = _mm512_maskz_cvtepu8_epi16(0xffffffff, group);
      _mm512_storeu_si512(out, _mm512_maskz_permutexvar_epi16(0xffffffff, index, table));
    }
  }
};

#endif

// vectorize() for a loop that takes PlainUnpack, Avx2Unpack or Avx512Unpack.
template <typename Loop>
void vectorize_unpacking(const Loop& loop) {
  vectorize_by<PlainUnpack, Avx2Unpack, Avx512Unpack>(loop);
}

}  // namespace dct::cpu
