#pragma once

// For flat tensors: the tiles of ranges, sums of residual and gradient, and entries of payloads.

#include "../../common/floats.h"
#include "../../common/payload.h"
#include "device.cuh"

namespace dct::cuda {

// Maps linear tile indices to (range, tile in the range). Every range has as many tiles as a full
// range, so the last tiles of a range that the end of the tensor cuts short are empty. The first
// tile of a range may also be empty, but its header must still be written or read.
struct RangeTiles {
  int64_t numel, range_length, tile;  // elements of the tensor, of a full range and of a tile
  unsigned per_range;                 // tiles
  int64_t total;                      // tiles in all ranges

  struct Tile {
    int range, index;     // the range, and the tile's index in it
    int64_t range_numel;  // elements of the range
    Range bounds;         // elements of the tile
  };

  RangeTiles(int64_t numel, int64_t ranges, int64_t range_length, int64_t tile)
      : numel(numel), range_length(range_length), tile(tile) {
    const int64_t tiles = max(ceil_div(min(range_length, numel), tile), int64_t{1});
    per_range = static_cast<unsigned>(tiles);
    total = ranges * tiles;
  }

  __device__ Range bounds_of(int64_t range) const {
    return range_of_length(numel, range_length, range);
  }

  __device__ Tile locate(unsigned tile_index) const {
    const unsigned range = tile_index / per_range, index = tile_index % per_range;
    const Range bounds = bounds_of(range);
    const int64_t begin = min(bounds.begin + index * tile, bounds.end);
    return {static_cast<int>(range),
            static_cast<int>(index),
            bounds.end - bounds.begin,
            {begin, min(begin + tile, bounds.end)}};
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
