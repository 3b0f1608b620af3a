#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dct::cuda {

using Word = unsigned long long;  // what CUDA's 64-bit atomics take

// After it, the caller sees all that was written before earlier calls on the same address; after a
// barrier, so does its block.
__device__ inline unsigned add_acquire_release(unsigned* address, unsigned value) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}

}  // namespace dct::cuda
