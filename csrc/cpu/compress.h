#pragma once

// Compaction of vector lanes, for which AVX2 has no instruction.

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

namespace dct::cpu {

// The indices of a byte's set bits, in its bytes.
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

// Moves the lanes whose bits are set to the front, in order; the other lanes are unspecified.
__attribute__((target("avx2"))) inline __m256i compress(__m256i lanes, uint32_t mask) {
  const __m256i from = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(kSetBits.of[mask]));
  return _mm256_permutevar8x32_epi32(lanes, from);
}

}  // namespace dct::cpu

#endif
