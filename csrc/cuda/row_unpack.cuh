#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// Scatters each row's k values into a row of zeros; a value whose position is not accepted is
// dropped. One launch; none without rows. No access is out of bounds, whatever the positions are.
cudaError_t row_unpack(const RowUnpackArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
