#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace dct::cpu {

constexpr int64_t kStreamBytes = 32 << 20;  // an output that no cache will keep for its reader

// memcpy past the caches, for memory that will have left them before anyone reads it: its lines are
// not fetched only to be overwritten. The compiler has no loop for that; SSE2 is in every x86-64.
inline void stream_copy(void* to, const void* from, int64_t nbytes) {
#if defined(__SSE2__)
  auto* out = static_cast<uint8_t*>(to);
  const auto* in = static_cast<const uint8_t*>(from);
  int64_t i = std::min<int64_t>(-reinterpret_cast<intptr_t>(to) & 15, nbytes);
  std::memcpy(out, in, i);
  for (; i + 16 <= nbytes; i += 16) {
    const __m128i line = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), line);
  }
  std::memcpy(out + i, in + i, nbytes - i);
  _mm_sfence();  // before the task is reported done, as an ordinary store would be
#else
  std::memcpy(to, from, nbytes);
#endif
}

}  // namespace dct::cpu
