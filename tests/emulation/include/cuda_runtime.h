// cuda_runtime.h -- stands in for CUDA's header of the same name: the part of the runtime and of
// the device language that csrc/cuda uses, on the emulator. Found by -I, so the .cu files compile
// as is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <type_traits>

#include "emulator/emulator.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict

#include "emulator/intrinsics.h"

using std::max;
using std::min;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
};
using cudaStream_t = struct EmulatedStream*;

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};
constexpr int cudaSharedmemCarveoutMaxShared = 100;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

namespace emulator {

// Dynamic shared memory above 48 KB must be asked for, kernel by kernel.
struct SharedLimits {
  std::mutex mutex;
  std::map<const void*, size_t> bytes;
};
inline SharedLimits& shared_limits() {
  static SharedLimits limits;
  return limits;
}

inline bool launchable(const void* kernel, const cudaLaunchConfig_t& config) {
  constexpr uint64_t kMaxGridX = 0x7fffffff, kMaxGridYZ = 0xffff, kMaxThreads = 1024;
  const dim3 grid = config.gridDim, block = config.blockDim;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  SharedLimits& limits = shared_limits();
  std::lock_guard<std::mutex> lock(limits.mutex);
  const auto limit = limits.bytes.find(kernel);
  return grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= kMaxGridX && grid.y <= kMaxGridYZ &&
         grid.z <= kMaxGridYZ && threads > 0 && threads <= kMaxThreads &&
         config.dynamicSmemBytes <= (limit == limits.bytes.end() ? 48 << 10 : limit->second);
}

}  // namespace emulator

// Filled, so that a kernel that relies on cleared memory is found out.
inline cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = std::malloc(bytes);
  std::memset(*data, 0xab, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* data) {
  std::free(data);
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  emulator::counts().memsets++;
  std::memset(data, value, bytes);
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int bytes) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  constexpr int kMaxBytes = 163 << 10;  // of sm_80, the smallest that the kernels are built for
  if (bytes > kMaxBytes) return cudaErrorInvalidValue;
  emulator::SharedLimits& limits = emulator::shared_limits();
  std::lock_guard<std::mutex> lock(limits.mutex);
  limits.bytes[reinterpret_cast<const void*>(kernel)] = bytes;
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  if (!emulator::launchable(reinterpret_cast<const void*>(kernel), *config)) {
    return cudaErrorInvalidConfiguration;
  }
  const bool ok = emulator::launch(config->gridDim, config->blockDim, config->dynamicSmemBytes,
                                   [&] { kernel(Parameters(arguments)...); });
  return ok ? cudaSuccess : cudaErrorLaunchFailure;
}
