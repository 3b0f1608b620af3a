// counted.cu -- kernels with obvious costs, run by one warp to test the counts.
#include <cstdint>

__global__ void __launch_bounds__(32) together(const int64_t* x, int64_t* out) {
  const int i = threadIdx.x;
  out[i] = x[i] + x[i + 32] + x[i + 64];
}

__global__ void __launch_bounds__(32) loops(int32_t* out, int32_t times) {
  int32_t x = threadIdx.x;
#pragma unroll 1
  for (int32_t i = 0; i < times; ++i) x = __shfl_xor_sync(0xffffffff, x, i) + 1;
  out[threadIdx.x] = x;
}

// ptxas unrolls this loop.
__global__ void __launch_bounds__(32) fills(int32_t* out, int32_t times) {
  for (int32_t i = 0; i < times; ++i) out[i * 32 + threadIdx.x] = 0;
}
