// bad_kernels.cu -- kernels that break promises, which the check must detect.

// More live values than fit in 32 registers.
__global__ void __launch_bounds__(1024, 2) spills(float* x) {
  float values[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) values[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = values[63 - i] * values[i];
}

// The array is on a thread's stack, because its index is known only at run time.
__global__ void __launch_bounds__(256) indexes(float* x, int index) {
  float values[8];
  for (int i = 0; i < 8; ++i) values[i] = x[i];
  values[index] = 0.0f;
  for (int i = 0; i < 8; ++i) x[i] = values[i ^ index & 7];
}

__global__ void __launch_bounds__(256) fuses(float* x) {
  x[threadIdx.x] = __fmaf_rn(x[threadIdx.x], x[0], x[1]);
}

__global__ void __launch_bounds__(256) flushes(float* x) {
  asm("add.ftz.f32 %0, %0, %0;" : "+f"(x[threadIdx.x]));
}

// One load and one store of 16 bytes would suffice.
__global__ void __launch_bounds__(256) reads_scalars(const float* x, float* y) {
  for (int i = 0; i < 4; ++i) y[4 * threadIdx.x + i] = x[4 * threadIdx.x + i];
}

// The second load starts only after the first has finished.
__global__ void __launch_bounds__(256) waits(const float4* x, float4* y) {
  float4 a = __ldcs(x + threadIdx.x);
  y[threadIdx.x] = a;
  __syncthreads();
  y[threadIdx.x + 256] = __ldcs(x + threadIdx.x + 256);
}

// Five blocks of 48 KB need 240 KB of shared memory, more than a multiprocessor has.
__global__ void __launch_bounds__(256, 5) crowds(float* x) {
  __shared__ float all[12288];
  for (int i = threadIdx.x; i < 12288; i += 256) all[i] = x[i];
  __syncthreads();
  x[threadIdx.x] = all[(threadIdx.x * 97) % 12288];
}

// Another block sets the flag, but a cache may hold the old value.
__global__ void __launch_bounds__(256) polls_weakly(const unsigned long long* flag, float* x) {
  if (*flag != 0) x[threadIdx.x] = 1.0f;
}

// Other blocks also add to `count`, which no promise declares.
__global__ void __launch_bounds__(256) counts_alone(unsigned* count) { atomicAdd(count, 1u); }

__device__ unsigned add_acquire_release(unsigned* address) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(old)
               : "l"(address)
               : "memory");
  return old;
}

// The last block may miss counts of other blocks.
__global__ void __launch_bounds__(256)
    releases_nothing(unsigned* count, unsigned* done, unsigned* x) {
  atomicAdd(&count[threadIdx.x], 1u);
  __syncthreads();
  if (atomicAdd(done, 1u) == gridDim.x - 1) x[threadIdx.x] = count[threadIdx.x];
}

__global__ void __launch_bounds__(256)
    counts_too_late(unsigned* count, unsigned* done, unsigned* x) {
  const unsigned before = add_acquire_release(done);
  atomicAdd(&count[threadIdx.x], 1u);
  if (before == gridDim.x - 1) x[threadIdx.x] = count[threadIdx.x];
}
