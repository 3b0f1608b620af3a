#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// Dequantizes rows of any bytes. One launch; none without rows.
cudaError_t row_dequantize(const RowDequantizeArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
