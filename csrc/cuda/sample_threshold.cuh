#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/ops.h"

namespace dct::cuda {

// Bytes of scratch memory that sample_threshold needs, aligned to 4 bytes.
int64_t sample_threshold_scratch_bytes(const SampleThresholdArgs& args);

// The k-th largest magnitude of each range, exact or of a stratified sample: one or two kernels if
// max_samples is small, else one memset and three kernels for all ranges together. `scratch` need
// not be cleared or kept.
cudaError_t sample_threshold(const SampleThresholdArgs& args, void* scratch, cudaStream_t stream);

}  // namespace dct::cuda
