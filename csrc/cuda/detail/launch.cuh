#pragma once

#include <cuda_runtime.h>

#include <atomic>
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

// Lets a kernel use `bytes` of dynamic shared memory, and prefers shared memory to the L1 cache.
// Asks the driver once per kernel and device.
template <auto kKernel>
cudaError_t allow_shared_bytes(int bytes) {
  constexpr int kMaxDevices = 64;
  static std::atomic<bool> allowed[kMaxDevices];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && device >= kMaxDevices) error = cudaErrorInvalidDevice;
  if (error != cudaSuccess || allowed[device]) return error;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  allowed[device] = error == cudaSuccess;
  return error;
}

}  // namespace dct::cuda
