#pragma once

// Decoupled look-back (Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled
// Look-back", 2016): a tile learns what its predecessors counted while they may still be running.
//
// Each tile has one 64-bit word: count << 3 | non_finite << 2 | status. Status and count travel in
// the same word, so a reader that sees the one has the other, and no fence is needed.

#include "warp.cuh"

namespace dct::cuda {

// Relaxed: no other memory is ordered by these, so what they carry must be in the word itself.
__device__ inline void store_relaxed(Word* address, Word value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline Word load_relaxed(const Word* address) {
  Word value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline void back_off() { __nanosleep(32); }

struct TileCount {
  Word count;
  bool non_finite;
};

constexpr Word kNotYet = 0;     // what the scratch is cleared to
constexpr Word kOwn = 1;        // the tile's own count
constexpr Word kInclusive = 2;  // and that of all before it in its range
constexpr Word kStatusMask = 3;

__device__ inline void publish(Word* word, TileCount count, Word status) {
  store_relaxed(word, count.count << 3 | Word{count.non_finite} << 2 | status);
}

// How far one round trip to memory sees, in warps' widths. While a tile looks back once, some 50 to
// 100 others start on a large GPU: a window much smaller than that falls ever further behind.
constexpr int kWindows = 4;

// Publishes tile `index` of a range and returns what the tiles before it hold. Called by one whole
// warp. `words` are those of the range. Ends only if all tiles before have started: tiles are to be
// numbered in the order in which their blocks start.
__device__ inline TileCount look_back(Word* words, int index, TileCount own) {
  const int lane = lane_index();
  if (lane == 0) publish(&words[index], own, index == 0 ? kInclusive : kOwn);

  TileCount before = {0, false};
  int nearest = index - 1;   // tile not yet counted
  bool found = nearest < 0;  // the inclusive count of a tile
  while (!found) {
    Word seen[kWindows];
#pragma unroll
    for (int w = 0; w < kWindows; ++w) {
      const int tile = nearest - w * kWarpSize - lane;
      seen[w] = tile >= 0 ? load_relaxed(&words[tile]) : kInclusive;
    }
#pragma unroll
    for (int w = 0; w < kWindows; ++w) {
      const Word word = seen[w], status = word & kStatusMask;
      const unsigned inclusive = __ballot_sync(kFullWarp, status == kInclusive);
      const unsigned missing = __ballot_sync(kFullWarp, status == kNotYet);
      // Only the tiles up to the nearest inclusive one matter.
      const unsigned wanted = inclusive != 0 ? (inclusive & -inclusive) * 2 - 1 : kFullWarp;
      if ((missing & wanted) != 0) {
        back_off();
        break;
      }
      const int stop = __ffs(static_cast<int>(inclusive)) - 1;
      const bool counts = wanted >> lane & 1;
      // A tile's own count is small, so 32 of them fit the 32 bits of the hardware's reduction.
      const unsigned own_count = counts && lane != stop ? static_cast<unsigned>(word >> 3) : 0;
      before.count += __reduce_add_sync(kFullWarp, own_count);
      before.non_finite |= __any_sync(kFullWarp, counts && (word >> 2 & 1)) != 0;
      if (stop >= 0) {
        before.count += __shfl_sync(kFullWarp, word, stop) >> 3;
        found = true;
        break;
      }
      nearest -= kWarpSize;
    }
  }
  if (lane == 0 && index > 0) {
    publish(&words[index], {before.count + own.count, before.non_finite || own.non_finite},
            kInclusive);
  }
  return before;
}

}  // namespace dct::cuda
