#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/ops.h"

namespace dct::cuda {

// Bytes of device memory that sample_threshold needs to work in, aligned to 4 bytes.
int64_t sample_threshold_scratch_bytes(const SampleThresholdArgs& args);

// A quantile of the magnitudes of each segment, exact or of a stratified sample, for all segments
// together: one kernel or two where max_samples is few, else one memset and three kernels. Nothing
// of `scratch` need survive the call or be cleared before it. `numel` is that of x: offsets in
// `segments` that pass it are cut.
cudaError_t sample_threshold(const SampleThresholdArgs& args, int64_t numel, void* scratch,
                             cudaStream_t stream);

}  // namespace dct::cuda
