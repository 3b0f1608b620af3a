#pragma once

#include <cuda_runtime_api.h>

#include "../common/ops.h"

namespace dct::cuda {

// Moves each segment's threshold towards its target count. One launch; none without segments.
cudaError_t track_threshold(const TrackThresholdArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
