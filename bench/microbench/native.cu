// Compact GPU kernels of other methods, called through native.py. The functions take raw pointers
// and return a cudaError_t.
#include <cuda_runtime.h>
#include <thrust/iterator/counting_iterator.h>

#include <cstdint>
#include <cub/device/device_select.cuh>

namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 4;  // 16-byte loads in flight per thread

// Streaming loads and stores of 16 bytes, with the same cache hints as our kernels.
__global__ void __launch_bounds__(kThreads) copy(uint4* to, const uint4* from, int64_t vectors) {
  const int64_t first = int64_t{blockIdx.x} * kThreads * kVectors + threadIdx.x;
  uint4 x[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (first + j * kThreads < vectors) x[j] = __ldcs(from + first + j * kThreads);
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (first + j * kThreads < vectors) __stcs(to + first + j * kThreads, x[j]);
  }
}

unsigned blocks(int64_t work) { return static_cast<unsigned>((work + kThreads - 1) / kThreads); }

__global__ void __launch_bounds__(kThreads) add(float4* acc, const float4* grad, int64_t vectors) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= vectors) return;
  float4 a = acc[i];
  const float4 g = grad[i];
  a.x += g.x, a.y += g.y, a.z += g.z, a.w += g.w;
  acc[i] = a;
}

__global__ void __launch_bounds__(kThreads)
    take(float* acc, const int32_t* indices, float* values, const int32_t* count) {
  const int32_t stride = gridDim.x * kThreads;
  for (int32_t j = blockIdx.x * kThreads + threadIdx.x; j < *count; j += stride) {
    values[j] = acc[indices[j]];
    acc[indices[j]] = 0.0f;
  }
}

struct Passes {
  const float* acc;
  const float* tau;
  __device__ bool operator()(int32_t i) const { return fabsf(acc[i]) >= *tau; }
};

}  // namespace

extern "C" {

cudaError_t native_copy(void* to, const void* from, int64_t nbytes, cudaStream_t stream) {
  const int64_t vectors = nbytes / 16;
  copy<<<blocks((vectors + kVectors - 1) / kVectors), kThreads, 0, stream>>>(
      static_cast<uint4*>(to), static_cast<const uint4*>(from), vectors);
  return cudaGetLastError();
}

cudaError_t native_select_scratch(int64_t numel, size_t* nbytes) {
  *nbytes = 0;
  return cub::DeviceSelect::If(nullptr, *nbytes, thrust::counting_iterator<int32_t>(0),
                               static_cast<int32_t*>(nullptr), static_cast<int32_t*>(nullptr),
                               numel, Passes{});
}

// acc += grad. Writes indices and values of entries that pass, in order, and sets them to 0 in acc.
cudaError_t native_select(float* acc, const float* grad, const float* tau, int32_t* indices,
                          float* values, int32_t* count, int64_t numel, void* scratch,
                          size_t scratch_bytes, cudaStream_t stream) {
  add<<<blocks(numel / 4), kThreads, 0, stream>>>(reinterpret_cast<float4*>(acc),
                                                  reinterpret_cast<const float4*>(grad), numel / 4);
  const cudaError_t selected =
      cub::DeviceSelect::If(scratch, scratch_bytes, thrust::counting_iterator<int32_t>(0), indices,
                            count, numel, Passes{acc, tau}, stream);
  if (selected != cudaSuccess) return selected;
  take<<<1024, kThreads, 0, stream>>>(acc, indices, values, count);
  return cudaGetLastError();
}

}  // extern "C"
