// scatter_unpack.cu -- sums the payloads of all ranks and scatters them into a dense tensor.
//
// A thread block owns one payload block of the output (16,384 elements) or half of one, and keeps
// it in shared memory. Each of its warps owns an equal part. The thread block first validates the
// entries of every rank for the payload block and partitions them among its warps. Then each warp
// independently adds its entries in rank order and writes its elements once.
#include "detail/device.cuh"
#include "detail/rank_block.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

// Three blocks with 69 KB of shared memory each are resident.
using Whole = BlockShape<8, 1, 3>;
// Half of the shared memory of Whole, and twice the warps. Compared with Whole, a warp has a
// quarter of the elements and validates half of the ranks. All positions are validated twice.
using Half = BlockShape<16, 2, 2>;

template <typename Shape>
struct ScatterShared {
  RangeTiles::Tile block;
  RankBlock<Shape::kWarps> ranks[ScatterPolicy::kRanks];
};

// Iterates over the entries of a warp, rank by rank, 32 entries of one rank at a time.
template <int kWarps>
struct EntryCursor {
  const RankBlock<kWarps>* ranks;
  int num_ranks, warp;
  int rank = 0, first = ranks[0].warp_begin[warp];

  __device__ bool at_end() const { return rank == num_ranks; }
  __device__ const RankBlock<kWarps>& from() const { return ranks[rank]; }
  __device__ int end() const { return from().warp_begin[warp + 1]; }
  // Not to be called past the last rank. A rank without entries also takes one step.
  __device__ void next() {
    first += kWarpSize;
    if (first >= end() && ++rank < num_ranks) first = from().warp_begin[warp];
  }
};

// Adds the entries of a warp in rank order to the sums of the positions from `begin` on. Several
// groups of 32 entries are loaded before the first is added, to hide latency. Converting a value
// and subtracting `begin` must wait for the load, so both are done when the entry is added. By one
// warp.
template <typename Value, int kWarps>
__device__ void add(EntryCursor<kWarps> entries, int begin, float* sums) {
  const int lane = lane_index();
  while (!entries.at_end()) {
    int position[ScatterPolicy::kInFlight];
    Value value[ScatterPolicy::kInFlight][1];
#pragma unroll
    for (int q = 0; q < ScatterPolicy::kInFlight; ++q) {
      position[q] = -1;
      if (entries.at_end()) continue;
      const int entry = entries.first + lane;
      if (entry < entries.end()) {
        uint16_t read[1];
        stream_in(entries.from().positions + entry, read);
        stream_in(reinterpret_cast<const Value*>(entries.from().values) + entry, value[q]);
        position[q] = read[0];
      }
      entries.next();
    }
#pragma unroll
    for (int q = 0; q < ScatterPolicy::kInFlight; ++q) {
      if (position[q] >= 0) {
        float& sum = sums[position[q] - begin];
        sum = __fadd_rn(sum, to_float(value[q][0]));
      }
      __syncwarp();
    }
  }
}

// Adding +0.0 turns -0.0 into +0.0.
template <typename Out>
__device__ Out finish(float sum, float factor) {
  return round_result<Out>(__fadd_rn(0.0f, __fmul_rn(factor, sum)));
}

// Writes the elements of a warp, out[0, length). By one warp.
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

template <typename Shape, typename Value, typename Out>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMinBlocks)
    scatter_unpack_kernel(ScatterUnpackArgs args, RangeTiles blocks, PayloadLayout layout,
                          bool aligned) {
  constexpr int kWarps = Shape::kWarps, kParts = Shape::kParts;
  __shared__ ScatterShared<Shape> shared;
  extern __shared__ __align__(16) float sums[];
  auto* ranks = shared.ranks;
  const RangeTiles::Tile& block = shared.block;
  const int warp = warp_index(), lane = lane_index(), part = static_cast<int>(blockIdx.x % kParts);
  if (thread_index() == 0) shared.block = blocks.locate(blockIdx.x / kParts);
  auto* warp_sums = reinterpret_cast<float4*>(sums + warp * Shape::kWarpElements);
  for (int i = lane; i < Shape::kWarpElements / 4; i += kWarpSize) {
    warp_sums[i] = make_float4(0, 0, 0, 0);
  }
  __syncthreads();
  for (int64_t begin = 0; begin < args.ranks; begin += ScatterPolicy::kRanks) {
    const int64_t left = args.ranks - begin;
    const int num_ranks =
        left < ScatterPolicy::kRanks ? static_cast<int>(left) : ScatterPolicy::kRanks;
    if (begin > 0) __syncthreads();  // the previous ranks must be added first
    if (thread_index() < num_ranks) {
      const int64_t rank = begin + thread_index();
      const uint8_t* payload = args.payloads + (rank * args.ranges + block.range) * layout.nbytes;
      const int32_t status = find_entries(args, layout, payload, block, ranks[thread_index()]);
      if (status != 0) atomicOr(&args.status[rank], status);
    }
    __syncthreads();
    const int length = static_cast<int>(block.bounds.end - block.bounds.begin);
    for (int r = warp; r < num_ranks; r += kWarps) {
      if (partition_entries<Shape>(ranks[r], length, part)) continue;
      __syncwarp();  // an invalid block has no entries
      if (lane <= kWarps) ranks[r].warp_begin[lane] = 0;
      if (lane == 0) atomicOr(&args.status[begin + r], kStatusPositions);
    }
    __syncthreads();
    add<Value>(EntryCursor<kWarps>{ranks, num_ranks, warp}, part * Shape::kPart, sums);
    for (int r = 0; thread_index() == 0 && part == 0 && r < num_ranks; ++r) {
      if (ranks[r].poisoned) sums[0] = bits_to_float(kFloat32Nan);
    }
    __syncwarp();
  }
  const int offset = warp * Shape::kWarpElements;
  const int64_t begin = block.bounds.begin + part * Shape::kPart + offset;
  const auto length =
      static_cast<int>(min(block.bounds.end - begin, int64_t{Shape::kWarpElements}));
  const float factor =
      args.out_scale != nullptr ? __fmul_rn(args.scale, *args.out_scale) : args.scale;
  auto* out = static_cast<Out*>(args.out) + begin;
  if (length > 0) write(out, length, aligned, sums + offset, factor);
}

template <typename Shape, typename Value, typename Out>
cudaError_t run(const ScatterUnpackArgs& args, const RangeTiles& blocks, cudaStream_t stream) {
  constexpr auto kKernel = scatter_unpack_kernel<Shape, Value, Out>;
  const cudaError_t allowed = allow_shared_bytes<kKernel>(Shape::kSumBytes);
  if (allowed != cudaSuccess) return allowed;
  const PayloadLayout layout =
      payload_layout(args.numel, args.capacity, args.value_dtype, args.ranges);
  return launch(kKernel, blocks.total * Shape::kParts, Shape::kThreads, Shape::kSumBytes, stream,
                args, blocks, layout, is_aligned(args.out, 16));
}

// Returns whether each payload block is processed as two halves. Halves take more instructions, but
// are faster if there is a multiprocessor for each half (in small tensors), or if shared memory
// holds only one whole block.
bool takes_halves(const RangeTiles& blocks) {
  const int fit = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) /
                  static_cast<int>(Whole::kSumBytes + sizeof(ScatterShared<Whole>));
  return 2 * blocks.total <= multiprocessors() || fit < 2;
}

}  // namespace

cudaError_t scatter_unpack(const ScatterUnpackArgs& args, cudaStream_t stream) {
  if (args.ranks > 0) {
    const cudaError_t cleared =
        cudaMemsetAsync(args.status, 0, sizeof(int32_t) * args.ranks, stream);
    if (cleared != cudaSuccess) return cleared;
  }
  const int64_t length = range_length(args.numel, args.ranges);
  const RangeTiles blocks(args.numel, args.ranges, length, kBlock);
  return dispatch_payload_value(args.value_dtype, [&](auto value) {
    return dispatch(args.out_dtype, [&](auto out) {
      using Value = decltype(value);
      using Out = decltype(out);
      return takes_halves(blocks) ? run<Half, Value, Out>(args, blocks, stream)
                                  : run<Whole, Value, Out>(args, blocks, stream);
    });
  });
}

}  // namespace dct::cuda
