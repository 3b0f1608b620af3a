#pragma once

#include "platform.cuh"

namespace dct::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffff;

__device__ inline int thread_index() { return static_cast<int>(threadIdx.x); }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x / kWarpSize); }
__device__ inline int lane_index() { return static_cast<int>(threadIdx.x % kWarpSize); }

// Sum over the warp, returned in every lane.
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

// The number of ascending `values` (up to 2^30) that are <= key. By one thread.
__device__ inline int upper_bound(const int64_t* values, int count, int64_t key) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (values[middle] <= key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The same by one warp, with up to 32 probes at a time, so that 1,000 values cost two round trips
// to memory. The stride is at least 32 until one last step probes every value. No access is out of
// bounds, whatever the values are.
__device__ inline int warp_upper_bound(const int64_t* values, int count, int64_t key) {
  int low = 0, high = count;
  while (low < high) {
    const int left = high - low;
    const int stride = left > kWarpSize ? max((left - 1) / kWarpSize + 1, kWarpSize) : 1;
    const int probe = low + lane_index() * stride;
    const bool at_most = probe < high && values[probe] <= key;
    const int passed = __popc(__ballot_sync(kFullWarp, at_most));
    if (passed == 0) return low;
    high = min(low + passed * stride, high);
    low += (passed - 1) * stride + 1;
  }
  return low;
}

}  // namespace dct::cuda
