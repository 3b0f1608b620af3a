#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// The k entries of largest magnitude of each row, in column order, and where they were. Exactly k:
// of equal magnitudes the lower columns. One launch; none without rows.
cudaError_t row_pack(const RowPackArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
