#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dct::cuda {

using Word = unsigned long long;  // the type of CUDA's 64-bit atomics

// Atomic add with acquire-release semantics at device scope. Writes that preceded earlier calls on
// this address are visible to the calling thread, and after a barrier to its block.
__device__ inline unsigned add_acquire_release(unsigned* address, unsigned value) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}

constexpr int kCacheLine = 128;  // bytes

// Brings the line of an address to the L2 cache. Nothing waits for it.
__device__ inline void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace dct::cuda
