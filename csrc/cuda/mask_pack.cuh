#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/ops.h"

namespace dct::cuda {

// Tile sizes. The results do not depend on them.
struct MaskPackSizes {
  int warp_tile;      // elements per warp: 1,024 or 2,048
  int slot_capacity;  // entries that a warp can stage, a multiple of 8 up to 2,048
};
MaskPackSizes mask_pack_sizes(const MaskPackArgs& args);

// Bytes of scratch memory that mask_pack needs, aligned to 16 bytes.
int64_t mask_pack_scratch_bytes(const MaskPackArgs& args, const MaskPackSizes& sizes);

// Adds the gradient to the residual, packs the entries that pass the range's threshold in ascending
// order and leaves the rest in the residual: two kernels, and one pass over the tensor unless more
// is kept than slots hold. `scratch` need not be cleared. Entries are lost if only the second
// launch fails, which does not happen in a sound context. Tensors of fewer than 2^38 elements.
cudaError_t mask_pack(const MaskPackArgs& args, const MaskPackSizes& sizes, void* scratch,
                      cudaStream_t stream);

}  // namespace dct::cuda
