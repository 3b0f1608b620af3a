#pragma once

// The scratch memory through which the first kernel of mask_pack passes results to the second.

#include "../../common/ops.h"
#include "device.cuh"
#include "elements.cuh"

namespace dct::cuda {

constexpr int kPass = 1024;  // elements that a warp of the first kernel loads together

// The result of the first kernel for one warp. Elements after the staged passes are unchanged.
struct WarpCount {
  uint32_t kept : 12;    // entries that pass the threshold
  uint32_t staged : 12;  // how many of them, from the first on, are stored in the warp's slot
  uint32_t passes : 8;   // number of passes whose entries are staged
};

// Scratch memory, which need not be cleared: the first kernel writes all that the second reads.
struct Staging {
  int warp_tile;           // elements per warp; a tile is kWarps times as long and divides kBlock
  uint32_t slot_capacity;  // entries per slot, a multiple of 8
  uint32_t* totals;        // [tiles], aligned to 16 bytes: entries kept | any non-finite << 31
  WarpCount* counts;       // [tiles, kWarps], right after the totals
  uint8_t* slots;          // [tiles, kWarps]: u16 positions[slot_capacity], value[slot_capacity]

  __device__ Entries slot(int64_t tile, uint32_t warp, DType value_dtype) const {
    const auto bytes = slot_capacity * static_cast<uint32_t>(2 + itemsize(value_dtype));
    uint8_t* const entries = slots + tile * (kWarps * bytes) + warp * bytes;
    return {reinterpret_cast<uint16_t*>(entries), entries + 2 * slot_capacity, slot_capacity,
            value_dtype};
  }
};

// The threshold of a range: at least the smallest subnormal, so zeros never pass.
__device__ inline float threshold_of(const MaskPackArgs& args, int range) {
  return fmaxf(args.threshold[range], bits_to_float(1));
}

// Both kernels use this function for elements that are not staged, so their selections are equal.
__device__ inline bool passes(float sum, float threshold) { return !(fabsf(sum) < threshold); }

}  // namespace dct::cuda
