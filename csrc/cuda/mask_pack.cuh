#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/ops.h"

namespace dct::cuda {

// Tile sizes. The results do not depend on them.
struct MaskPackSizes {
  int warp_tile;  // elements per warp: 512, 1,024 or 2,048; without a gradient not 512
  int room;       // entries per slot, a multiple of 8 up to 2,048
};
MaskPackSizes mask_pack_sizes(const MaskPackArgs& args);

// Bytes of scratch memory that mask_pack needs, aligned to 16 bytes.
int64_t mask_pack_scratch_bytes(const MaskPackArgs& args, const MaskPackSizes& sizes);

// Adds the gradient to the residual, packs what passes the thresholds in ascending order and leaves
// the rest in the residual: two kernels, and one pass over the tensor unless more is kept than
// slots hold. `scratch` need not be cleared. Entries are lost if only the second launch fails,
// which does not happen in a sound context.
//
// Any content of `segments` is safe; results are specified only for offsets that ascend from 0 to
// numel. Tensors of fewer than 2^38 elements.
cudaError_t mask_pack(const MaskPackArgs& args, const MaskPackSizes& sizes, void* scratch,
                      cudaStream_t stream);

}  // namespace dct::cuda
