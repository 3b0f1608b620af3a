#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// Accumulates into residuals, writes every entry in the payload's format and leaves what is not
// sent. Two launches.
cudaError_t quantize_pack(const QuantizePackArgs& args, cudaStream_t stream);

// The first of them: writes the headers of all ranges, and zeros to `cleared` [num_cleared].
cudaError_t write_quantized_headers(uint8_t* payload, int64_t numel, int64_t ranges, int64_t nbytes,
                                    PayloadFormat format, int32_t* cleared, int64_t num_cleared,
                                    cudaStream_t stream);

}  // namespace dct::cuda
