#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// Quantizes every row to codes of few bits and a scale. One launch; none without rows.
cudaError_t row_quantize(const RowQuantizeArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
