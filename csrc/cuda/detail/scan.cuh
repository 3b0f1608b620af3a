#pragma once

// Scans over a group of kThreads threads: some of a warp's lanes, one warp, or a whole block.

#include "warp.cuh"

namespace dct::cuda {

// What a block's scan needs in shared memory; that of a warp, or of a part of it, needs nothing.
template <int kThreads>
struct ScanStorage {
  int warp_total[(kThreads + kWarpSize - 1) / kWarpSize];
};

struct Scanned {
  int before;  // of the threads below this one
  int total;   // of the group
};

struct Sum {
  static constexpr int kIdentity = 0;
  __device__ int operator()(int a, int b) const { return a + b; }
};
struct Max {
  static constexpr int kIdentity = -1;  // of values >= -1
  __device__ int operator()(int a, int b) const { return a > b ? a : b; }
};

// By all threads of the group, and all groups of a warp. A block may call it again at once.
template <int kThreads, typename Operation>
__device__ Scanned scan(int value, Operation operation, ScanStorage<kThreads>& storage) {
  constexpr int kLanes = kThreads < kWarpSize ? kThreads : kWarpSize;
  const int lane = thread_index() % kLanes;
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const int below = __shfl_up_sync(kFullWarp, value, distance);
    if (lane >= distance) value = operation(below, value);
  }
  const int previous = __shfl_up_sync(kFullWarp, value, 1);
  Scanned result = {lane == 0 ? Operation::kIdentity : previous,
                    __shfl_sync(kFullWarp, value, lane_index() | (kLanes - 1))};
  if constexpr (kThreads > kWarpSize) {
    if (lane == 0) storage.warp_total[warp_index()] = result.total;
    __syncthreads();
    result.total = Operation::kIdentity;
    for (int w = 0; w < kThreads / kWarpSize; ++w) {
      if (w == warp_index()) result.before = operation(result.total, result.before);
      result.total = operation(result.total, storage.warp_total[w]);
    }
    __syncthreads();
  }
  return result;
}

}  // namespace dct::cuda
