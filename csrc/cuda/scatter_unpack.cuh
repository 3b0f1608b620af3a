#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// Sums the payloads of all ranks, in rank order, into `out`: one memset (of the status) and one
// kernel, which reads each entry and writes each output element once. No atomics on floats, so the
// result is deterministic. No access is out of bounds, whatever the payloads are.
cudaError_t scatter_unpack(const ScatterUnpackArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
