#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// Gathers each row's values at the positions of an earlier row_pack; 0 where a position is not
// accepted. One launch; none without rows. No access is out of bounds, whatever the positions are.
cudaError_t row_gather(const RowGatherArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
