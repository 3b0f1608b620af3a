#pragma once

// Up to 64 floats in registers. GNU vectors provide arithmetic and comparisons. Compilers generate
// poor code for widening bytes and for non-temporal stores, so this file has intrinsics for them.
// Functions without a target attribute cannot return wide vectors, so results are output arguments.

#include <cstdint>
#include <cstring>

#include "../common/floats.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace dct::cpu {

template <int kBytes>
struct Lanes;

template <>
struct Lanes<16> {
  static constexpr int kCount = 4;
  typedef float Floats __attribute__((vector_size(16)));
  template <typename X>
  static void widen(const X* x, Floats& out) {
    for (int i = 0; i < kCount; ++i) out[i] = to_float(x[i]);
  }
  static void stream(const Floats& x, float* out) { std::memcpy(out, &x, sizeof(x)); }
};

#if defined(__x86_64__) && defined(__GNUC__)

template <>
struct Lanes<32> {
#define DCT_AVX2 __attribute__((target("avx2")))
  static constexpr int kCount = 8;
  typedef float Floats __attribute__((vector_size(32)));
  DCT_AVX2 static void widen(const int8_t* x, Floats& out) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
    out = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  DCT_AVX2 static void widen(const BFloat16* x, Floats& out) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    out = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
  }
  DCT_AVX2 static void widen(const float* x, Floats& out) { out = _mm256_loadu_ps(x); }
  DCT_AVX2 static void stream(const Floats& x, float* out) { _mm256_stream_ps(out, x); }
#undef DCT_AVX2
};

template <>
struct Lanes<64> {
#define DCT_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
  static constexpr int kCount = 16;
  typedef float Floats __attribute__((vector_size(64)));
  // The masks select all lanes. Without masks, gcc 12 warns about an uninitialized value.
  DCT_AVX512 static void widen(const int8_t* x, Floats& out) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    out = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bytes));
  }
  DCT_AVX512 static void widen(const BFloat16* x, Floats& out) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    const __m512i wide = _mm512_maskz_cvtepu16_epi32(0xffff, words);
    out = _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, wide, 16));
  }
  DCT_AVX512 static void widen(const float* x, Floats& out) { out = _mm512_loadu_ps(x); }
  DCT_AVX512 static void stream(const Floats& x, float* out) { _mm512_stream_ps(out, x); }
#undef DCT_AVX512
};

#endif

// kFloats floats, as vectors of kBytes bytes each.
template <int kBytes, int kFloats = 64>
struct Group {
  using Own = Lanes<kBytes>;
  using Floats = typename Own::Floats;
  static constexpr int kEntries = kFloats;
  Floats of[kEntries / Own::kCount];

  // Calls function(floats, i) for each vector. `i` is the index of its first entry.
  template <typename Function>
  void for_each(const Function& function) {
    for (int v = 0; v < kEntries / Own::kCount; ++v) function(of[v], v * Own::kCount);
  }
};

}  // namespace dct::cpu
