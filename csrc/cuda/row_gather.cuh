#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// Reads each row at the columns that row_pack chose for another; 0 where a position is invalid. One
// launch; none without rows. Whatever the positions hold, no access is out of bounds.
cudaError_t row_gather(const RowGatherArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
