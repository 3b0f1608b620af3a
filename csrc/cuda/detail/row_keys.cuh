#pragma once

// Magnitudes of row elements as integers that order alike, in 32-bit words: one key of float32 in a
// word, or two of a two-byte dtype, which are then compared together. NaN ranks as infinity.

#include "../../common/dtype.h"
#include "../../common/rounding.h"
#include "platform.cuh"

namespace dct::cuda {

template <typename T>
struct RowKeys;

template <>
struct RowKeys<float> {
  static constexpr int kBits = 31, kPerWord = 1, kInfinity = 0x7f800000;

  // Of the columns of one word, of which `left` are in the row: those beyond have key 0. kAligned:
  // words of the row are.
  template <bool kAligned>
  __device__ static uint32_t load(const float* at, int left) {
    return left > 0 ? float_to_bits(*at) & 0x7fffffff : 0;
  }
  __device__ static int key(uint32_t word, int) { return min(static_cast<int>(word), kInfinity); }
  // How many keys are >= threshold, for 0 < threshold <= kInfinity.
  template <int N>
  __device__ static int count(const uint32_t (&words)[N], int threshold) {
    int count = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) count += words[j] >= static_cast<uint32_t>(threshold);
    return count;
  }
};

template <int kInfinityBits>
struct HalfKeys {
  static constexpr int kBits = 15, kPerWord = 2, kInfinity = kInfinityBits;
  // Above each key, where the sign was: a subtraction from one half then never borrows from the
  // other.
  static constexpr uint32_t kGuards = 0x80008000;

  template <bool kAligned, typename T>
  __device__ static uint32_t load(const T* at, int left) {
    uint32_t bits = 0;
    if (kAligned) {  // then the width is even
      if (left > 0) bits = *reinterpret_cast<const uint32_t*>(at);
    } else {
      if (left > 0) bits = at[0].bits;
      if (left > 1) bits |= uint32_t{at[1].bits} << 16;
    }
    return bits | kGuards;
  }
  __device__ static int key(uint32_t word, int element) {
    return min(static_cast<int>(word >> (16 * element) & 0x7fff), kInfinity);
  }
  template <int N>
  __device__ static int count(const uint32_t (&words)[N], int threshold) {
    const uint32_t both = static_cast<uint32_t>(threshold) * 0x10001;
    uint32_t counts = 0;  // 16 bits each
#pragma unroll
    for (int j = 0; j < N; ++j) counts += ((words[j] - both) & kGuards) >> 15;
    return static_cast<int>((counts & 0xffff) + (counts >> 16));
  }
};
template <>
struct RowKeys<BFloat16> : HalfKeys<0x7f80> {};
template <>
struct RowKeys<Float16> : HalfKeys<0x7c00> {};

}  // namespace dct::cuda
