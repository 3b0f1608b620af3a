#pragma once

// Magnitudes as integer keys of the same order, in 32-bit words. A word has one float32 key, or two
// keys of a 16-bit dtype that are compared together. The key of a NaN is above the key of infinity.
// Thresholds are at most the key of infinity, so NaN and infinity rank equally.

#include "../../common/floats.h"
#include "device.cuh"

namespace dct::cuda {

template <typename T>
struct RowKeys;

constexpr int kKeyGroups = 8;  // groups of the keys of a lane

// Shifts the mask left by one and appends the sign bit of x.
__device__ inline uint32_t append_sign(uint32_t mask, uint32_t x) {
  return __funnelshift_l(x, mask, 1);
}

template <>
struct RowKeys<float> {
  static constexpr int kBits = 31, kPerWord = 1, kInfinity = 0x7f800000;

  __device__ static uint32_t word(uint32_t bits) { return bits & 0x7fffffff; }
  // The word at `at`. Columns past the end of the row have key 0.
  __device__ static uint32_t load(const float* at, int left) {
    return word(left > 0 ? float_to_bits(*at) : 0);
  }
  __device__ static int key(uint32_t word, int) { return static_cast<int>(word); }
  // The upper halves of two keys, which are bfloat16 keys.
  __device__ static uint32_t halves(uint32_t first, uint32_t second) {
    return __byte_perm(first, second, 0x7632);
  }
  // The number of keys >= threshold, for 0 < threshold <= kInfinity.
  template <int N>
  __device__ static int count(const uint32_t (&words)[N], int threshold) {
    int count = N;
#pragma unroll
    for (int j = 0; j < N; ++j) count += (static_cast<int>(words[j]) - threshold) >> 31;
    return count;
  }
  // The mask of keys >= threshold, with the lowest bit for the first key. It is empty if threshold
  // is 1 << kBits.
  template <int N>
  __device__ static uint32_t reaching(const uint32_t (&words)[N], uint32_t threshold) {
    uint32_t below = 0;
#pragma unroll
    for (int j = N - 1; j >= 0; --j) below = append_sign(below, words[j] - threshold);
    return ~below & ~uint32_t{0} >> (32 - N);
  }
};

template <int kInfinityBits>
struct HalfKeys {
  static constexpr int kBits = 15, kPerWord = 2, kInfinity = kInfinityBits;
  static constexpr uint32_t kMagnitudes = 0x7fff7fff, kOnes = 0x10001;

  __device__ static uint32_t word(uint32_t bits) { return bits & kMagnitudes; }
  template <typename T>
  __device__ static uint32_t load(const T* at, int left) {
    uint32_t bits = left > 0 ? at[0].bits : 0;
    if (left > 1) bits |= uint32_t{at[1].bits} << 16;
    return word(bits);
  }
  __device__ static int key(uint32_t word, int element) {
    return static_cast<int>(word >> (16 * element) & 0x7fff);
  }
  // Sets the top bit of each half whose key is >= threshold. Neither half carries into the other.
  __device__ static uint32_t compared(uint32_t word, uint32_t threshold) {
    return word + (0x8000 - threshold) * kOnes;
  }
  // The same comparison, as 1 or 0 in each half, for 0 < threshold <= kInfinity.
  __device__ static uint32_t reached(uint32_t word, uint32_t threshold) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    return compared(word, threshold) >> 15 & kOnes;
#else
    // One instruction for both halves: 1 + key - threshold, clamped to [0, 1].
    return __viaddmin_s16x2_relu(word, ((1 - threshold) & 0xffff) * kOnes, kOnes);
#endif
  }
  template <int N>
  __device__ static void largest(const uint32_t (&words)[N], int (&largest)[kKeyGroups]) {
    constexpr int kPairs = kKeyGroups / 2;
    uint32_t both[kPairs];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      uint32_t& pair = both[j % kPairs];
      pair = j < kPairs ? words[j] : __vmaxu2(pair, words[j]);
    }
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      largest[p] = key(both[p], 0);
      largest[kPairs + p] = key(both[p], 1);
    }
  }
  template <int N>
  __device__ static int count(const uint32_t (&words)[N], int threshold) {
    uint32_t counts = 0;  // two, of 16 bits each
#pragma unroll
    for (int j = 0; j < N; ++j) counts += reached(words[j], static_cast<uint32_t>(threshold));
    return static_cast<int>((counts & 0xffff) + (counts >> 16));
  }
  template <int N>
  __device__ static uint32_t reaching(const uint32_t (&words)[N], uint32_t threshold) {
    uint32_t mask = 0;
#pragma unroll
    for (int j = N - 1; j >= 0; --j) {
      const uint32_t both = compared(words[j], threshold);
      mask = append_sign(append_sign(mask, both), both << 16);
    }
    return mask;
  }
};
template <>
struct RowKeys<BFloat16> : HalfKeys<0x7f80> {};
template <>
struct RowKeys<Float16> : HalfKeys<0x7c00> {};

}  // namespace dct::cuda
