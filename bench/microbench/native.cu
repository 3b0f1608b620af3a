// Compact GPU kernels of other methods, called through native.py. The functions take raw pointers
// and return a cudaError_t.
#include <thrust/iterator/counting_iterator.h>

#include <cub/device/device_select.cuh>

#include "copy.cu"

namespace {

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

// Based on RTop-K (ICLR 2025; github.com/xiexi51/RTopK). One warp per row finds the threshold by
// bisection on the value, and packs with ballots. Magnitudes of at least `high` come first. Ties,
// which are magnitudes in [low, high), follow. Both are in column order.
__global__ void __launch_bounds__(kThreads)
    rtopk(const float* x, int64_t rows, int width, int k, float* values, int32_t* columns) {
  extern __shared__ float shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / 32) + warp;
  if (row >= rows) return;
  float* own = shared + warp * width;
  float high = 0.0f;
  for (int c = lane; c < width; c += 32) {
    own[c] = x[row * width + c];
    high = fmaxf(high, fabsf(own[c]));
  }
  for (int d = 16; d > 0; d /= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, d));
  float low = 0.0f;  // at least k magnitudes reach low; at most k exceed high
  for (int round = 0; round < 32; ++round) {
    const float middle = low + (high - low) / 2;
    int count = 0;
    for (int c = lane; c < width; c += 32) count += fabsf(own[c]) >= middle;
    count = __reduce_add_sync(~0u, count);
    if (count >= k) low = middle;
    if (count <= k) high = middle;
    if (count == k) break;
  }
  const int whole = (width + 31) / 32 * 32;
  int packed = 0;
  for (int begin = 0; begin < 2 * whole && packed < k; begin += 32) {  // ties come last
    const bool ties = begin >= whole;
    const int c = begin - (ties ? whole : 0) + lane;
    const float magnitude = c < width ? fabsf(own[c]) : -1.0f;
    const bool pass = ties ? low <= magnitude && magnitude < high : magnitude >= high;
    const unsigned mask = __ballot_sync(~0u, pass);
    const int slot = packed + __popc(mask & ((1u << lane) - 1));
    if (pass && slot < k) {
      values[row * k + slot] = own[c];
      columns[row * k + slot] = c;
    }
    packed += __popc(mask);
  }
}

}  // namespace

extern "C" {

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

cudaError_t native_rtopk(const float* x, int64_t rows, int64_t width, int64_t k, float* values,
                         int32_t* columns, cudaStream_t stream) {
  const int warps = width <= 1024 ? 8 : 2;
  rtopk<<<static_cast<unsigned>((rows + warps - 1) / warps), warps * 32,
          warps * width * sizeof(float), stream>>>(x, rows, static_cast<int>(width),
                                                   static_cast<int>(k), values, columns);
  return cudaGetLastError();
}

}  // extern "C"
