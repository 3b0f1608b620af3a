#pragma once

// Locates, validates and partitions the entries of one rank for one block of scatter_unpack.

#include "../../common/floats.h"
#include "../../common/ops.h"
#include "device.cuh"
#include "elements.cuh"

namespace dct::cuda {

struct ScatterPolicy {
  static constexpr int kRanks = 64;    // ranks that are validated together
  static constexpr int kInFlight = 8;  // warp-wide loads issued before the first is used
  static constexpr int kPrefetched =
      8 * kCacheLine;  // bytes of a rank's positions and of its values
};

// The split of a payload block among thread blocks and their warps. A thread block holds the sums
// of its part in shared memory.
template <int kWarpsOfBlock, int kPartsOfBlock, int kMinBlocksOfShape>
struct BlockShape {
  static constexpr int kWarps = kWarpsOfBlock, kParts = kPartsOfBlock;
  static constexpr int kMinBlocks = kMinBlocksOfShape, kThreads = kWarps * kWarpSize;
  static constexpr int kPart = kBlock / kParts;         // elements of a thread block
  static constexpr int kWarpElements = kPart / kWarps;  // elements that a warp owns
  static constexpr size_t kSumBytes = kPart * sizeof(float);
};

// The entries of one rank for this block.
template <int kWarps>
struct RankBlock {
  const uint16_t* positions;
  const uint8_t* values;
  int entries;
  bool poisoned;  // non-finite entries may be lost: the first element of the range becomes NaN
  uint16_t warp_begin[kWarps + 1];  // the first entry of each warp, and the end
};

// Prefetches up to kPrefetched of `bytes` bytes into the L2 cache.
__device__ inline void prefetch_entries(const void* entries, uint32_t bytes) {
  const auto* begin = static_cast<const char*>(entries);
  for (uint32_t at = 0; at < min(bytes, uint32_t{ScatterPolicy::kPrefetched}); at += kCacheLine) {
    prefetch_line(begin + at);
  }
}

// Locates the entries of a rank for this block, and prefetches up to kPrefetched bytes of their
// positions and of their values. Without the prefetch, a warp would wait for memory for each rank,
// because it checks its ranks one after the other. Returns the status bits known so far. By one
// thread.
template <int kWarps>
__device__ int32_t find_entries(const ScatterUnpackArgs& args, const PayloadLayout& layout,
                                const uint8_t* payload, const RangeTiles::Tile& block,
                                RankBlock<kWarps>& found) {
  found.entries = 0;
  found.poisoned = false;
  if (block.index > 0 && block.bounds.begin == block.bounds.end) return 0;  // past a short range
  // Loaded together with the header, in one round trip to memory. An empty range has one start.
  const auto* starts = reinterpret_cast<const uint32_t*>(payload + layout.starts) + block.index;
  const uint32_t first = starts[0], end = starts[block.range_numel > 0 ? 1 : 0];
  const auto header = *reinterpret_cast<const PayloadHeader*>(payload);
  if (!header_ok(header, block.range_numel, args.capacity, args.value_dtype)) return kStatusHeader;
  found.poisoned = lost_non_finite(header) && block.index == 0 && block.range_numel > 0;
  if (first > end || end > header.count || (block.index == 0 && first != 0) ||
      (block.index + 1 >= num_blocks(block.range_numel) && end != header.count)) {
    return kStatusStarts;
  }
  // More entries than elements cannot ascend strictly, so they are rejected unread.
  if (end - first > block.bounds.end - block.bounds.begin) return kStatusPositions;
  found.positions = reinterpret_cast<const uint16_t*>(payload + layout.positions) + first;
  found.values = payload + layout.values + first * itemsize(args.value_dtype);
  found.entries = static_cast<int>(end - first);
  prefetch_entries(found.positions, (end - first) * sizeof(uint16_t));
  prefetch_entries(found.values, (end - first) * itemsize(args.value_dtype));
  return 0;
}

// Returns whether the positions of a rank ascend strictly within the block, and finds where the
// entries of each warp of a part begin. Several rounds of positions and their predecessors are
// loaded before the first is used. Lanes past the end load the last position again. By one warp.
template <typename Shape>
__device__ bool partition_entries(RankBlock<Shape::kWarps>& rank, int length, int part) {
  constexpr int kRounds = ScatterPolicy::kInFlight, kWarps = Shape::kWarps;
  // The warp that owns a position, -1 before the part, or kWarps after it.
  const auto owner = [part](int position) {
    const int warp = position / Shape::kWarpElements - part * kWarps;
    return Shape::kParts == 1 ? warp : min(max(warp, -1), kWarps);
  };
  const int lane = lane_index(), last = rank.entries - 1;
  for (int begin = lane; begin - lane <= last; begin += kRounds * kWarpSize) {
    uint16_t position[kRounds], below[kRounds];
#pragma unroll
    for (int q = 0; q < kRounds; ++q) {
      const int i = min(begin + q * kWarpSize, last);
      position[q] = rank.positions[i];
      below[q] = rank.positions[max(i - 1, 0)];
    }
    bool bad = false;
#pragma unroll
    for (int q = 0; q < kRounds; ++q) {
      bad |= (position[q] >= length) | ((begin + q > 0) & (last > 0) & (position[q] <= below[q]));
    }
    if (__any_sync(kFullWarp, bad)) return false;
#pragma unroll
    for (int q = 0; q < kRounds; ++q) {
      const int i = begin + q * kWarpSize;
      if (i > last) break;
      const int previous = i == 0 ? -1 : owner(below[q]);
      const int warp = owner(position[q]);
      for (int w = previous + 1; w <= warp; ++w) rank.warp_begin[w] = static_cast<uint16_t>(i);
    }
  }
  const int next = last < 0 ? 0 : owner(rank.positions[last]) + 1;
  if (next + lane <= kWarps) rank.warp_begin[next + lane] = static_cast<uint16_t>(last + 1);
  return true;
}

}  // namespace dct::cuda
