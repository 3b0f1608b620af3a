#pragma once

// For memory that is read or written once: prefetching and non-temporal stores.

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace dct::cpu {

// Prefetches rows that are read in order. A row takes so long to process that the hardware
// prefetcher stops.
template <typename X>
class Prefetch {
 public:
  Prefetch(const X* x, int64_t width, int64_t rows)
      : x_(x), width_(width), rows_(rows), ahead_(kAheadBytes / (width * kSize) + 1) {}

  // Prefetches the row that begins more than kAheadBytes bytes after the start of `row`.
  void before(int64_t row) const {
    if (row + ahead_ >= rows_) return;
    const X* next = x_ + (row + ahead_) * width_;
    for (int64_t i = 0; i < width_; i += kLineBytes / kSize) __builtin_prefetch(next + i);
  }

 private:
  static constexpr int64_t kSize = sizeof(X), kLineBytes = 64, kAheadBytes = 2048;
  const X* x_;
  int64_t width_, rows_, ahead_;
};

// Prefetches memory ahead of `out` for writing. A store waits for its cache line, and the hardware
// does not prefetch far enough ahead for stores.
template <typename Out>
void prefetch_ahead(const Out* out, int64_t n) {
  constexpr int64_t kAheadBytes = 4096, kLineBytes = 64;
  const auto* bytes = reinterpret_cast<const uint8_t*>(out) + kAheadBytes;
  for (int64_t i = 0; i < n * static_cast<int64_t>(sizeof(Out)); i += kLineBytes) {
    __builtin_prefetch(bytes + i, 1);
  }
}

constexpr int64_t kStreamBytes = 32 << 20;  // outputs of this size or more do not stay in caches

// Non-temporal stores, for output that does not stay in the caches until it is read. They write a
// cache line without loading it first. They need SSE2, which every x86-64 processor has. A task
// calls stream_end() at its end to order these stores before later ones.

// `to` is 16-byte aligned, and nbytes is a multiple of 16.
inline void stream_aligned(void* to, const void* from, int64_t nbytes) {
#if defined(__SSE2__)
  const auto* in = static_cast<const __m128i*>(from);
  auto* out = static_cast<__m128i*>(to);
  for (int64_t i = 0; i < nbytes / 16; ++i) _mm_stream_si128(out + i, _mm_loadu_si128(in + i));
#else
  std::memcpy(to, from, nbytes);
#endif
}

inline void stream_copy(void* to, const void* from, int64_t nbytes) {
  auto* out = static_cast<uint8_t*>(to);
  const auto* in = static_cast<const uint8_t*>(from);
  const int64_t head = std::min<int64_t>(-reinterpret_cast<intptr_t>(to) & 15, nbytes);
  const int64_t aligned = (nbytes - head) / 16 * 16, tail = head + aligned;
  std::memcpy(out, in, head);
  stream_aligned(out + head, in + head, aligned);
  std::memcpy(out + tail, in + tail, nbytes - tail);
}

inline void stream_end() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace dct::cpu
