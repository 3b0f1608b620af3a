#pragma once

// What a rank sent for a block of scatter_unpack: found, checked, and divided among warps.

#include "../../common/ops.h"
#include "../../common/rounding.h"
#include "range_tiles.cuh"
#include "sections.cuh"
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
template <typename Value>
constexpr bool kE3M0 = std::is_same_v<Value, E3M0>;
static_assert(kSubBlock % kPart == 0, "a warp's elements are in one sub-block");

// What one rank sent for this block.
struct RankBlock {
  const uint16_t* positions;  // of its entries; of e3m0 these are all of an entry
  const uint8_t* values;
  int entries;
  bool poisons;               // non-finite entries were lost: the range's first element becomes NaN
  uint16_t part[kWarps + 1];  // the first of the entries that each warp adds
  uint16_t sub_starts[kSubBlocks - 1];  // of e3m0, and the scale's biased exponent
  uint16_t scale;
};

// The position in the block of entry `i`, as it was read.
template <typename Value>
__device__ int position_of(const RankBlock& rank, int i, uint16_t read) {
  if constexpr (!kE3M0<Value>) return read;
  int sub_block = 0;
  for (uint16_t start : rank.sub_starts) sub_block += i >= start;
  return sub_block * int{kSubBlock} + (read >> 4);
}

// By one thread: finds a rank's entries for this block. Returns the status bits known so far.
template <typename Value>
__device__ int32_t find_entries(const ScatterUnpackArgs& args, const Sections& layout,
                                const uint8_t* payload, const RangeTiles::Tile& block,
                                RankBlock& found) {
  found.entries = 0;
  found.poisons = false;
  // Read along with the header, in one round trip to memory. An empty range has one start.
  const auto* starts = reinterpret_cast<const uint32_t*>(payload + layout.starts) + block.index;
  const uint32_t first = starts[0], end = starts[block.range_numel > 0 ? 1 : 0];
  if constexpr (kE3M0<Value>) {
    const auto* sub_starts = reinterpret_cast<const uint16_t*>(payload + layout.sub_starts);
    for (int q = 0; q < kSubBlocks - 1; ++q) {
      found.sub_starts[q] =
          block.range_numel > 0 ? sub_starts[(kSubBlocks - 1) * block.index + q] : 0;
    }
  }
  const auto header = *reinterpret_cast<const PayloadHeader*>(payload);
  const bool ok = kE3M0<Value>
                      ? e3m0_header_ok(header, block.range_numel, args.capacity)
                      : header_ok(header, block.range_numel, args.capacity, args.value_dtype);
  if (!ok) return kStatusHeader;
  // Of e3m0 no entry is non-finite; of the others one that is may not have fit.
  const bool lost = kE3M0<Value> ? (header.flags & kFlagNonFinite) != 0 : lost_non_finite(header);
  found.poisons = lost && block.index == 0 && block.range_numel > 0;
  if (first > end || end > header.count || (block.index == 0 && first != 0) ||
      (block.last && end != header.count)) {
    return kStatusStarts;
  }
  if constexpr (kE3M0<Value>) {
    found.scale = static_cast<uint16_t>(header.reserved[0]);
    uint32_t before = 0;
    for (uint32_t start : found.sub_starts) {
      if (start < before || start > end - first) return kStatusStarts;
      before = start;
    }
  }
  // More entries than elements cannot ascend: bad without looking.
  if (end - first > block.bounds.end - block.bounds.begin) return kStatusPositions;
  found.positions = reinterpret_cast<const uint16_t*>(payload + layout.positions) + first;
  found.values = payload + layout.values + first * itemsize(args.value_dtype);
  found.entries = static_cast<int>(end - first);
  return 0;
}

// By one warp: whether a rank's positions ascend strictly within the block (those of e3m0, in each
// sub-block, if they do in the block); notes where each warp's entries begin. Several rounds of
// positions, each with the one before it, are read before the first is looked at; whoever has none
// reads the last again.
template <typename Value>
__device__ bool divide(RankBlock& rank, int length) {
  constexpr int kRounds = Policy::kInFlight;
  const int lane = lane_index(), last = rank.entries - 1;
  for (int begin = lane; begin - lane <= last; begin += kRounds * kWarpSize) {
    int position[kRounds], below[kRounds];
#pragma unroll
    for (int q = 0; q < kRounds; ++q) {
      const int i = min(begin + q * kWarpSize, last), before = max(i - 1, 0);
      position[q] = position_of<Value>(rank, i, rank.positions[i]);
      below[q] = position_of<Value>(rank, before, rank.positions[before]);
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
  const int parts = last < 0 ? 0 : position_of<Value>(rank, last, rank.positions[last]) / kPart + 1;
  if (parts + lane <= kWarps) rank.part[parts + lane] = static_cast<uint16_t>(last + 1);
  return true;
}

// What a lane has read of an entry, and what it is.
template <typename Value>
struct Entry {
  int position = -1;  // none
  Value value[1];

  __device__ void read(const RankBlock& from, int i) {
    uint16_t read[1];
    stream_in(from.positions + i, read);
    stream_in(reinterpret_cast<const Value*>(from.values) + i, value);
    position = read[0];
  }
  __device__ bool is_there() const { return position >= 0; }
  __device__ void add_to(float* sums) const {
    sums[position] = __fadd_rn(sums[position], to_float(value[0]));
  }
};
template <>
struct Entry<E3M0> {
  int bits = -1;
  uint32_t scale;

  __device__ void read(const RankBlock& from, int i) {
    uint16_t read[1];
    stream_in(from.positions + i, read);
    bits = read[0];
    scale = from.scale;
  }
  __device__ bool is_there() const { return bits >= 0; }
  __device__ void add_to(float* sums) const {
    float& sum = sums[warp_index() * kPart / kSubBlock * kSubBlock + (bits >> 4)];
    sum = __fadd_rn(sum, E3M0Scale(scale).value(bits));
  }
};

}  // namespace dct::cuda
