#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// Adds the payloads of all ranks in order and packs the sum again. Two launches.
cudaError_t dequantize_sum_pack(const DequantizeSumPackArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
