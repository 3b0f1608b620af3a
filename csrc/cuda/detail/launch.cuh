#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

namespace dct::cuda {

constexpr int64_t kMaxGrid = 0x7fffffff;

// Launches a grid of at least one block and returns the launch error.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes,
                   cudaStream_t stream, Arguments&&... arguments) {
  if (blocks > kMaxGrid) return cudaErrorInvalidValue;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace dct::cuda
