// add.cu -- r += g, the yardstick of mask_pack: it moves the same 12 bytes an element and does
// nothing else. Loads and stores are mask_pack's.
#include <cstdint>

constexpr int kThreads = 256;
constexpr int kVectors = 4;  // of 16 bytes each, of both, before the first is used

__global__ void __launch_bounds__(kThreads)
    add_kernel(float4* r, const float4* g, int64_t vectors) {
  const int64_t first = int64_t{blockIdx.x} * kThreads * kVectors + threadIdx.x;
  float4 a[kVectors], b[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (first + j * kThreads < vectors) {
      a[j] = __ldcs(r + first + j * kThreads);
      b[j] = __ldcs(g + first + j * kThreads);
    }
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (first + j * kThreads < vectors) {
      a[j].x += b[j].x, a[j].y += b[j].y, a[j].z += b[j].z, a[j].w += b[j].w;
      __stcs(r + first + j * kThreads, a[j]);
    }
  }
}
