#pragma once

#include "../../common/payload.h"
#include "device.cuh"

namespace dct::cuda {

// Maps linear tile indices to (range, tile of the range), for a tensor split into ranges and ranges
// split into tiles. Ranges begin at whole blocks, so a tile never spans two. An empty range has one
// empty tile, because its header must still be written or read.
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

}  // namespace dct::cuda
