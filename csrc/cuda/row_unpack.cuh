#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// Spreads each row's k values over a row of zeros; a value whose position is invalid is dropped.
// One launch; none without rows. Whatever the positions hold, no access is out of bounds.
cudaError_t row_unpack(const RowUnpackArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
