#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/ops.h"

namespace dct::cuda {

// Bytes of device memory that mask_pack needs to work in, aligned to 8 bytes.
int64_t mask_pack_scratch_bytes(const MaskPackArgs& args);

// Adds the gradient to the residual, packs what passes the thresholds in ascending order and leaves
// the rest in the residual: one memset and one kernel, one pass over the tensor. Nothing of
// `scratch` need survive the call or be cleared before it.
//
// Any content of `segments` is safe; results are specified only for offsets that ascend from 0 to
// numel. Tensors of fewer than 2^38 elements.
cudaError_t mask_pack(const MaskPackArgs& args, void* scratch, cudaStream_t stream);

}  // namespace dct::cuda
