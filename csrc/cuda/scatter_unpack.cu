// scatter_unpack.cu -- the sum of all ranks' payloads, scattered into a dense tensor.
//
// A thread block owns one payload block of the output, 16,384 elements in shared memory, and each
// of its warps 2,048 of these. The block first validates every rank's entries for it and partitions
// them among its warps. Then each warp, independently, adds its entries in rank order and writes
// its elements once.
#include "detail/device.cuh"
#include "detail/rank_block.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

constexpr size_t kSumBytes = kBlock * sizeof(float);

struct Shared {
  RangeTiles::Tile block;
  RankBlock ranks[Policy::kRanks];
};

// Adds the entries of a warp's elements in rank order, 32 entries of one rank at a time. Several
// groups of 32 are loaded before the first is added, to hide latency; values are converted where
// they are added, because a conversion waits for its load. By one warp.
template <typename Value>
__device__ void add(const RankBlock* ranks, int num_ranks, float* sums) {
  const int warp = warp_index(), lane = lane_index();
  int rank = 0, first = ranks[0].warp_begin[warp];
  while (rank < num_ranks) {
    int position[Policy::kInFlight];
    Value value[Policy::kInFlight][1];
#pragma unroll
    for (int q = 0; q < Policy::kInFlight; ++q) {
      position[q] = -1;
      if (rank == num_ranks) continue;
      const RankBlock& from = ranks[rank];
      const int entry = first + lane, end = from.warp_begin[warp + 1];
      if (entry < end) {
        uint16_t read[1];
        stream_in(from.positions + entry, read);
        stream_in(reinterpret_cast<const Value*>(from.values) + entry, value[q]);
        position[q] = read[0];
      }
      first += kWarpSize;
      if (first >= end && ++rank < num_ranks) first = ranks[rank].warp_begin[warp];
    }
#pragma unroll
    for (int q = 0; q < Policy::kInFlight; ++q) {
      if (position[q] >= 0) {
        float& sum = sums[position[q]];
        sum = __fadd_rn(sum, to_float(value[q][0]));
      }
      __syncwarp();
    }
  }
}

// 0 + x has no negative zeros.
template <typename Out>
__device__ Out finish(float sum, float factor) {
  return round_to<Out>(__fadd_rn(0.0f, __fmul_rn(factor, sum)));
}

// Writes a warp's elements, out[0, length). By one warp.
template <typename Out>
__device__ void write(Out* out, int length, bool aligned, const float* sums, float factor) {
  constexpr int kVector = 16 / sizeof(Out);
  const int lane = lane_index();
  const int in_vectors = aligned ? length / kVector * kVector : 0;
  for (int i = lane * kVector; i < in_vectors; i += kWarpSize * kVector) {
    Out x[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) x[e] = finish<Out>(sums[i + e], factor);
    stream_out(out + i, x);
  }
  for (int i = in_vectors + lane; i < length; i += kWarpSize) {
    out[i] = finish<Out>(sums[i], factor);
  }
}

template <typename Value, typename Out>
__global__ void __launch_bounds__(kThreads, Policy::kMinBlocks)
    scatter_unpack_kernel(ScatterUnpackArgs args, RangeTiles blocks, PayloadLayout layout,
                          bool aligned) {
  __shared__ Shared shared;
  extern __shared__ __align__(16) float sums[];
  RankBlock* ranks = shared.ranks;
  const RangeTiles::Tile& block = shared.block;
  const int warp = warp_index(), lane = lane_index();
  if (thread_index() == 0) shared.block = blocks.locate(blockIdx.x);
  auto* warp_sums = reinterpret_cast<float4*>(sums + warp * kWarpElements);
  for (int i = lane; i < kWarpElements / 4; i += kWarpSize) warp_sums[i] = make_float4(0, 0, 0, 0);
  __syncthreads();
  for (int64_t begin = 0; begin < args.ranks; begin += Policy::kRanks) {
    const int64_t left = args.ranks - begin;
    const int num_ranks = left < Policy::kRanks ? static_cast<int>(left) : Policy::kRanks;
    if (begin > 0) __syncthreads();  // until the previous ranks are added
    if (thread_index() < num_ranks) {
      const int64_t rank = begin + thread_index();
      const uint8_t* payload = args.payloads + (rank * args.ranges + block.range) * layout.nbytes;
      const int32_t status = find_entries(args, layout, payload, block, ranks[thread_index()]);
      if (status != 0) atomicOr(&args.status[rank], status);
    }
    __syncthreads();
    const int length = static_cast<int>(block.bounds.end - block.bounds.begin);
    for (int r = warp; r < num_ranks; r += kWarps) {
      if (partition_entries(ranks[r], length)) continue;
      __syncwarp();  // a bad block has no entries
      if (lane <= kWarps) ranks[r].warp_begin[lane] = 0;
      if (lane == 0) atomicOr(&args.status[begin + r], kStatusPositions);
    }
    __syncthreads();
    add<Value>(ranks, num_ranks, sums);
    for (int r = 0; thread_index() == 0 && r < num_ranks; ++r) {
      if (ranks[r].poisoned) sums[0] = bits_to_float(kFloat32Nan);
    }
    __syncwarp();
  }
  const int offset = warp * kWarpElements;
  const int64_t begin = block.bounds.begin + offset;
  const int length = static_cast<int>(min(block.bounds.end - begin, int64_t{kWarpElements}));
  const float factor =
      args.out_scale != nullptr ? __fmul_rn(args.scale, *args.out_scale) : args.scale;
  auto* out = static_cast<Out*>(args.out) + begin;
  if (length > 0) write(out, length, aligned, sums + offset, factor);
}

template <typename Value, typename Out>
cudaError_t run(const ScatterUnpackArgs& args, cudaStream_t stream) {
  const RangeTiles blocks(args.numel, args.ranges, kBlock);
  constexpr auto kKernel = scatter_unpack_kernel<Value, Out>;
  const cudaError_t allowed = allow_shared_bytes<kKernel>(kSumBytes);
  if (allowed != cudaSuccess) return allowed;
  const PayloadLayout layout =
      payload_layout(args.numel, args.capacity, args.value_dtype, args.ranges);
  return launch(kKernel, blocks.total, kThreads, kSumBytes, stream, args, blocks, layout,
                is_aligned(args.out, 16));
}

}  // namespace

cudaError_t scatter_unpack(const ScatterUnpackArgs& args, cudaStream_t stream) {
  if (args.ranks > 0) {
    const cudaError_t cleared =
        cudaMemsetAsync(args.status, 0, sizeof(int32_t) * args.ranks, stream);
    if (cleared != cudaSuccess) return cleared;
  }
  return dispatch_payload_value(args.value_dtype, [&](auto value) {
    return dispatch(args.out_dtype,
                    [&](auto out) { return run<decltype(value), decltype(out)>(args, stream); });
  });
}

}  // namespace dct::cuda
