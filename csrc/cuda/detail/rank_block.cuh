#pragma once

// What a rank sent for a block of scatter_unpack: found, checked, and divided among warps.

#include "../../common/ops.h"
#include "../../common/rounding.h"
#include "range_tiles.cuh"
#include "vectors.cuh"
#include "warp.cuh"

namespace dct::cuda {

struct Policy {
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 3;  // of 67 KB of shared memory each
  static constexpr int kRanks = 64;     // checked at a time
  static constexpr int kInFlight = 8;   // times 32 entries that a warp reads before it uses them
};
constexpr int kWarps = Policy::kThreads / kWarpSize;
constexpr int kPart = kBlock / kWarps;  // elements a warp owns

// What one rank sent for this block.
struct RankBlock {
  const uint16_t* positions;  // of its entries
  const uint8_t* values;
  int entries;
  bool poisons;               // non-finite entries were lost: the range's first element becomes NaN
  uint16_t part[kWarps + 1];  // the first of the entries that each warp adds
};

// By one thread: finds a rank's entries for this block. Returns the status bits known so far.
__device__ inline int32_t find_entries(const ScatterUnpackArgs& args, const PayloadLayout& layout,
                                       const uint8_t* payload, const RangeTiles::Tile& block,
                                       RankBlock& found) {
  found.entries = 0;
  found.poisons = false;
  // Read along with the header, in one round trip to memory. An empty range has one start.
  const auto* starts = reinterpret_cast<const uint32_t*>(payload + layout.starts) + block.index;
  const uint32_t first = starts[0], end = starts[block.range_numel > 0 ? 1 : 0];
  const auto header = *reinterpret_cast<const PayloadHeader*>(payload);
  if (!header_ok(header, block.range_numel, args.capacity, args.value_dtype)) return kStatusHeader;
  found.poisons = lost_non_finite(header) && block.index == 0 && block.range_numel > 0;
  if (first > end || end > header.count || (block.index == 0 && first != 0) ||
      (block.last && end != header.count)) {
    return kStatusStarts;
  }
  // More entries than elements cannot ascend: bad without looking.
  if (end - first > block.bounds.end - block.bounds.begin) return kStatusPositions;
  found.positions = reinterpret_cast<const uint16_t*>(payload + layout.positions) + first;
  found.values = payload + layout.values + first * itemsize(args.value_dtype);
  found.entries = static_cast<int>(end - first);
  return 0;
}

// By one warp: whether a rank's positions ascend strictly within the block; notes where each warp's
// entries begin. Several rounds of positions, each with the one before it, are read before the
// first is looked at; whoever has none reads the last again.
__device__ inline bool divide(RankBlock& rank, int length) {
  constexpr int kRounds = Policy::kInFlight;
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
      const int before = i == 0 ? -1 : below[q] / kPart;
      const int part = position[q] / kPart;
      for (int p = before + 1; p <= part; ++p) rank.part[p] = static_cast<uint16_t>(i);
    }
  }
  const int parts = last < 0 ? 0 : rank.positions[last] / kPart + 1;
  if (parts + lane <= kWarps) rank.part[parts + lane] = static_cast<uint16_t>(last + 1);
  return true;
}

}  // namespace dct::cuda
