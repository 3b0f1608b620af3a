#pragma once

// For flat tensors: the tiles of ranges, sums of residual and gradient, and entries of payloads.

#include "../../common/floats.h"
#include "../../common/payload.h"
#include "device.cuh"

namespace dct::cuda {

// Maps linear tile indices to (range, tile in the range). A tensor is split into ranges, and a
// range into tiles. Ranges begin at whole blocks, so a tile never spans two ranges. An empty range
// has one empty tile, because its header must still be written or read.
struct RangeTiles {
  int64_t numel, tile;
  int64_t range_length;     // elements of a full range
  unsigned full_ranges;     // ranges not cut short by the end of the tensor
  unsigned tiles_per_full;  // tiles in each full range
  unsigned short_tiles;     // tiles in the range that is cut short, if any
  int64_t total;            // tiles in all ranges

  struct Tile {
    int range, index;     // the range, and the tile's index in it
    int64_t range_numel;  // elements of the range
    Range bounds;         // elements of the tile
    bool last;            // whether it is the last tile of its range
  };

  RangeTiles(int64_t numel, int64_t ranges, int64_t tile)
      : numel(numel), tile(tile), range_length(range_blocks(numel, ranges) * kBlock) {
    const int64_t full = range_length > 0 ? numel / range_length : 0;
    const int64_t per_full = range_length / tile;
    const int64_t in_short = ceil_div(numel - full * range_length, tile);
    total = full * per_full + in_short + (ranges - full - (in_short > 0));
    full_ranges = static_cast<unsigned>(full);
    tiles_per_full = static_cast<unsigned>(per_full);
    short_tiles = static_cast<unsigned>(in_short);
  }

  __device__ Range bounds_of(unsigned range) const {
    const int64_t begin = min(range * range_length, numel);
    return {begin, min(begin + range_length, numel)};
  }

  // First tile and number of tiles of a range.
  __device__ unsigned first_of(unsigned range) const {
    if (range <= full_ranges) return range * tiles_per_full;
    return full_ranges * tiles_per_full + short_tiles + (range - full_ranges - (short_tiles > 0));
  }
  __device__ unsigned count_of(unsigned range) const {
    if (range < full_ranges) return tiles_per_full;
    return range == full_ranges && short_tiles > 0 ? short_tiles : 1;
  }

  __device__ Tile locate(unsigned tile_index) const {
    const unsigned in_full = full_ranges * tiles_per_full;
    unsigned range, index;
    if (tile_index < in_full) {
      range = tile_index / tiles_per_full;
      index = tile_index % tiles_per_full;
    } else if (tile_index - in_full < short_tiles) {
      range = full_ranges;
      index = tile_index - in_full;
    } else {
      range = full_ranges + (short_tiles > 0) + (tile_index - in_full - short_tiles);
      index = 0;
    }
    const Range bounds = bounds_of(range);
    Tile found;
    found.range = static_cast<int>(range);
    found.index = static_cast<int>(index);
    found.range_numel = bounds.end - bounds.begin;
    found.bounds.begin = bounds.begin + index * tile;
    found.last = bounds.end - found.bounds.begin <= tile;
    found.bounds.end = found.last ? bounds.end : found.bounds.begin + tile;
    return found;
  }
};

// residual + grad * scale. The product and the sum are rounded separately, never fused.
template <typename Grad>
__device__ float accumulate(float residual, Grad grad, float scale) {
  return __fadd_rn(residual, __fmul_rn(to_float(grad), scale));
}

// Calls visit(i, sum, inside) for 0 <= i < length, one element per lane, at any alignment. Lanes
// past the end call it with inside = false. Keeps several loads in flight. By one warp.
template <typename Grad, typename Visit>
__device__ void for_each_sum(const float* residual, const Grad* grad, float scale, int length,
                             Visit visit) {
  constexpr int kInFlight = 8;
  for (int first = lane_index(); first - lane_index() < length; first += kInFlight * kWarpSize) {
    float old[kInFlight] = {};
    Grad gradient[kInFlight] = {};
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      if (first + a * kWarpSize >= length) continue;
      old[a] = residual[first + a * kWarpSize];
      gradient[a] = grad[first + a * kWarpSize];
    }
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      const int i = first + a * kWarpSize;
      visit(i, accumulate(old[a], gradient[a], scale), i < length);
    }
  }
}

// A sum, split into a payload value (in the low bits) and a remainder for the residual. If the sum
// is finite, value + remainder == sum exactly. For float32, the remainder is 0. For bfloat16, the
// remainder has at most 16 significant bits, even if the value saturates or is subnormal. So
// `restore` recovers every bit.
struct Split {
  uint32_t bits;
  float remainder;
};
__device__ inline float payload_value(uint32_t bits, DType value_dtype) {
  return bits_to_float(value_dtype == DType::kBFloat16 ? bits << 16 : bits);
}
__device__ inline Split split(float sum, DType value_dtype) {
  const uint32_t bits = value_dtype == DType::kBFloat16
                            ? round_saturating<BFloat16>(sum).bits
                            : float_to_bits(round_saturating<float>(sum));
  return {bits, __fsub_rn(sum, payload_value(bits, value_dtype))};
}
__device__ inline float restore(float remainder, uint32_t bits, DType value_dtype) {
  return __fadd_rn(remainder, payload_value(bits, value_dtype));
}

__device__ inline void store_value(uint8_t* values, uint32_t index, uint32_t bits,
                                   DType value_dtype) {
  if (value_dtype == DType::kBFloat16) {
    reinterpret_cast<uint16_t*>(values)[index] = static_cast<uint16_t>(bits);
  } else {
    reinterpret_cast<uint32_t*>(values)[index] = bits;
  }
}
__device__ inline uint32_t load_value(const uint8_t* values, uint32_t index, DType value_dtype) {
  return value_dtype == DType::kBFloat16 ? reinterpret_cast<const uint16_t*>(values)[index]
                                         : reinterpret_cast<const uint32_t*>(values)[index];
}

// Memory for entries: the positions and values of a payload, or a part of them.
struct Entries {
  uint16_t* positions;
  uint8_t* values;
  uint32_t capacity;
  DType value_dtype;

  __device__ void put(uint32_t entry, int64_t element, uint32_t bits) const {
    positions[entry] = static_cast<uint16_t>(element & (kBlock - 1));
    store_value(values, entry, bits, value_dtype);
  }
  // The memory after the first `entries` entries.
  __device__ Entries after(Word entries) const {
    const auto skipped = static_cast<uint32_t>(min(entries, Word{capacity}));
    return {positions + skipped, values + skipped * itemsize(value_dtype), capacity - skipped,
            value_dtype};
  }
};

}  // namespace dct::cuda
