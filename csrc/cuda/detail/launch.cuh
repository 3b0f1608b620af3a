#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

namespace dct::cuda {

constexpr int64_t kMaxGrid = 0x7fffffff;

// Launches a one-dimensional grid of at least one block and returns the launch error.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes,
                   cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace dct::cuda
