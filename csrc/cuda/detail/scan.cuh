#pragma once

// Reductions and scans over a group of threads: part of a warp, a warp or a block.

#include "device.cuh"

namespace dct::cuda {

template <typename T>
__device__ T larger(T a, T b) {
  return a > b ? a : b;
}
template <typename T>
__device__ T sum(T a, T b) {
  return a + b;
}

// Reduces over groups of kLanes lanes of a warp.
template <int kLanes, typename Value, typename Operation>
__device__ Value reduce(Value value, Operation operation) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = operation(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

// Reduces the results of the kRowWarps warps of a block. Has one barrier, so the next call must use
// other `partials`. The call after it may use the same again.
template <int kRowWarps, typename Value, typename Operation>
__device__ Value reduce_warps(Value value, Operation operation, Value (&partials)[kWarps]) {
  if constexpr (kRowWarps > 1) {
    if (lane_index() == 0) partials[warp_index()] = value;
    __syncthreads();
    value = partials[0];
#pragma unroll
    for (int w = 1; w < kRowWarps; ++w) value = operation(value, partials[w]);
  }
  return value;
}

// Shared memory for the scan of a block. A scan within a warp needs no shared memory.
template <int kGroup>
struct ScanStorage {
  int warp_aggregates[(kGroup + kWarpSize - 1) / kWarpSize];
};

struct ScanResult {
  int exclusive;  // over the threads below this one
  int aggregate;  // over the group
};

struct Sum {
  static constexpr int kIdentity = 0;
  __device__ int operator()(int a, int b) const { return a + b; }
};
struct Max {
  static constexpr int kIdentity = -1;  // of values >= -1
  __device__ int operator()(int a, int b) const { return a > b ? a : b; }
};

// Scans over groups of kGroup threads. All threads of a group must call it, and all groups of a
// warp. A block may call it again without a barrier.
template <int kGroup, typename Operation>
__device__ ScanResult scan(int value, Operation operation, ScanStorage<kGroup>& storage) {
  constexpr int kLanes = kGroup < kWarpSize ? kGroup : kWarpSize;
  const int lane = thread_index() % kLanes;
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const int below = __shfl_up_sync(kFullWarp, value, distance);
    if (lane >= distance) value = operation(below, value);
  }
  const int previous = __shfl_up_sync(kFullWarp, value, 1);
  ScanResult result = {lane == 0 ? Operation::kIdentity : previous,
                       __shfl_sync(kFullWarp, value, lane_index() | (kLanes - 1))};
  if constexpr (kGroup > kWarpSize) {
    if (lane == 0) storage.warp_aggregates[warp_index()] = result.aggregate;
    __syncthreads();
    result.aggregate = Operation::kIdentity;
    for (int w = 0; w < kGroup / kWarpSize; ++w) {
      if (w == warp_index()) result.exclusive = operation(result.aggregate, result.exclusive);
      result.aggregate = operation(result.aggregate, storage.warp_aggregates[w]);
    }
    __syncthreads();
  }
  return result;
}

}  // namespace dct::cuda
