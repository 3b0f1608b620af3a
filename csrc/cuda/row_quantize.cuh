#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// Every row's entries as codes of few bits, with their scale. One launch;
// none without rows.
cudaError_t row_quantize(const RowQuantizeArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
