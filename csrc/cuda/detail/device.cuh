#pragma once

// Building blocks of kernels: launches, warp functions, atomics, vectorized loads and stores.

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../../common/floats.h"

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

// An attribute of the current device, or 0 on an error.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}
inline int multiprocessors() { return max(device_attribute(cudaDevAttrMultiProcessorCount), 1); }

// Lets a kernel use `bytes` bytes of dynamic shared memory, and prefers shared memory to L1 cache.
// Calls the driver once per kernel and device.
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

using Word = unsigned long long;  // the type of CUDA's 64-bit atomics

constexpr int kCacheLine = 128;  // bytes

// Prefetches the line of an address into the L2 cache. Does not wait.
__device__ inline void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

constexpr int kWarpSize = 32;
constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;  // of a block in most kernels
constexpr unsigned kFullWarp = 0xffffffff;

constexpr int kVectorBytes = 16;    // of the widest load or store
constexpr int kVectorElements = 4;  // float32 elements in such a vector
constexpr int kWarpVector =
    kWarpSize * kVectorElements;  // float32 elements that a warp loads at once

// Threads per block if kLanes lanes hold a row. A row of several warps has a block of its own, so
// that a barrier of the block concerns only this row.
template <int kLanes>
constexpr int kRowThreads = kLanes > kWarpSize ? kLanes : kThreads;

__device__ inline int thread_index() { return static_cast<int>(threadIdx.x); }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x / kWarpSize); }
__device__ inline int lane_index() { return static_cast<int>(threadIdx.x % kWarpSize); }

// The sum over the warp, in every lane.
template <typename T>
__device__ T warp_sum(T value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, distance);
  }
  return value;
}

// Inclusive prefix sum over the warp.
template <typename T>
__device__ T warp_inclusive_sum(T value) {
  const int lane = lane_index();
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const T below = __shfl_up_sync(kFullWarp, value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

// round_to for the result of an arithmetic instruction. Such an instruction returns NaN as the bits
// 0x7fffffff. The integer minimum replaces these bits by kFloat32Nan.
template <typename Out>
__device__ Out round_result(float x) {
  const auto bits = static_cast<uint32_t>(min(__float_as_int(x), int{kFloat32Nan}));
  if constexpr (sizeof(Out) == sizeof(float)) return bits_to_float(bits);
  if constexpr (std::is_same_v<Out, BFloat16>) {
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
  }
  return round_to<Out>(x);
}

// Streamed data leaves the caches before it could be used again, so it is marked evict-first.

template <int kBytes>
struct VectorOfBytes;
template <>
struct VectorOfBytes<2> {
  using Type = unsigned short;
};
template <>
struct VectorOfBytes<4> {
  using Type = unsigned;
};
template <>
struct VectorOfBytes<8> {
  using Type = uint2;
};
template <>
struct VectorOfBytes<16> {
  using Type = uint4;
};

// The vector type of N elements of T, up to 16 bytes.
template <typename T, int N>
using Vector = typename VectorOfBytes<sizeof(T) * N>::Type;

template <typename T, int N>
__device__ void stream_in(const T* address, T (&x)[N]) {
  const Vector<T, N> vector = __ldcs(reinterpret_cast<const Vector<T, N>*>(address));
  memcpy(x, &vector, sizeof(vector));
}

template <typename T, int N>
__device__ void stream_out(T* address, const T (&x)[N]) {
  Vector<T, N> vector;
  memcpy(&vector, x, sizeof(vector));
  __stcs(reinterpret_cast<Vector<T, N>*>(address), vector);
}

// Whether a vector of `bytes` bytes may start at this address.
inline bool is_aligned(const void* address, size_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

}  // namespace dct::cuda
