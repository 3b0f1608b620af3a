#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// Adds the payloads of all ranks, in rank order, into `out`: one memset (of the status) and one
// kernel, which reads each payload's entries and writes each output element once. No atomics on
// floats, so the result does not vary. Whatever the payloads hold, no access is out of bounds.
cudaError_t scatter_unpack(const ScatterUnpackArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
