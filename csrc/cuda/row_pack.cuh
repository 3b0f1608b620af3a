#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// Exact top-k of each row by magnitude, in column order, with positions; ties go to the lower
// columns. One launch; none without rows.
cudaError_t row_pack(const RowPackArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
