#pragma once

// The few things that are not said alike to nvcc and to g++. Everything else in this folder is
// plain CUDA C++, which g++ compiles against tests/emulation/include, where each CUDA thread is a
// fiber.

#include <cuda_runtime.h>

#include <cstdint>

namespace dct::cuda {

using Word = unsigned long long;  // what CUDA's 64-bit atomics take

}  // namespace dct::cuda

#if defined(__CUDACC__)

// A block's variable in shared memory, and an array whose size the launch gives.
#define DCT_SHARED(Type, name) __shared__ Type name
#define DCT_DYNAMIC_SHARED(Type, name)                           \
  extern __shared__ __align__(16) unsigned char dynamic_bytes[]; \
  Type* name = reinterpret_cast<Type*>(dynamic_bytes)

namespace dct::cuda {

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

#else

#include <emulator/platform.h>

#endif
