#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// Adds the payloads of all ranks in order. A memset, if there are any, and one launch.
cudaError_t dequantize_sum(const DequantizeSumArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
