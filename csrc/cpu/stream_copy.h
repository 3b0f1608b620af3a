#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace dct::cpu {

// memcpy to memory that will not be read soon: past the caches, so that the lines of `to` are not
// first read in order to be overwritten.
inline void stream_copy(void* to, const void* from, int64_t nbytes) {
#if defined(__SSE2__)
  auto* out = static_cast<uint8_t*>(to);
  const auto* in = static_cast<const uint8_t*>(from);
  const int64_t head = -reinterpret_cast<intptr_t>(to) & 15;
  if (nbytes >= head + 16) {
    std::memcpy(out, in, head);
    int64_t i = head;
    for (; i + 16 <= nbytes; i += 16) {
      const __m128i line = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), line);
    }
    std::memcpy(out + i, in + i, nbytes - i);
    _mm_sfence();  // ordered before the end of the task, as ordinary stores would be
    return;
  }
#endif
  std::memcpy(to, from, nbytes);
}

}  // namespace dct::cpu
