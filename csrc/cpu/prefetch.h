#pragma once

#include <cstdint>

namespace dct::cpu {

// Prefetches rows that are read in order: each takes so long that the hardware prefetcher stops.
template <typename X>
class Prefetch {
 public:
  Prefetch(const X* x, int64_t width, int64_t rows)
      : x_(x), width_(width), rows_(rows), ahead_(kAheadBytes / (width * kSize) + 1) {}

  // Prefetches a row some distance ahead of this one.
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

// Prefetches memory some distance ahead of `out` for writing: a store waits for its line, and the
// hardware does not prefetch far enough for stores.
template <typename Out>
void prefetch_ahead(const Out* out, int64_t n) {
  constexpr int64_t kAheadBytes = 4096, kLineBytes = 64;
  const auto* bytes = reinterpret_cast<const uint8_t*>(out) + kAheadBytes;
  for (int64_t i = 0; i < n * static_cast<int64_t>(sizeof(Out)); i += kLineBytes) {
    __builtin_prefetch(bytes + i, 1);
  }
}

}  // namespace dct::cpu
