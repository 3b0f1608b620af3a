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

}  // namespace dct::cuda
