// scatter_unpack.cu -- the sum of all ranks' payloads, scattered into a dense tensor.
//
// A thread block owns one payload block of the output, 16,384 elements, in shared memory; in it
// each warp owns 1,024. It first checks what every rank sent for the block, and notes where the
// entries of each warp begin. Then each warp, on its own, adds its entries rank after rank and
// writes its part of the output once.
#include "../common/payload.h"
#include "../common/rounding.h"
#include "detail/launch.cuh"
#include "detail/range_tiles.cuh"
#include "detail/vectors.cuh"
#include "detail/warp.cuh"
#include "scatter_unpack.cuh"

namespace dct::cuda {
namespace {

struct Policy {
  static constexpr int kThreads = 512;
  static constexpr int kMinBlocks = 3;  // of 66 KB of shared memory each
  static constexpr int kRanks = 32;     // checked at a time
  static constexpr int kInFlight = 4;   // ranks whose entries a warp reads before it adds them
};
constexpr int kWarps = Policy::kThreads / kWarpSize;
constexpr int kPart = kBlock / kWarps;  // elements a warp owns
constexpr size_t kSumBytes = kBlock * sizeof(float);

// What one rank sent for this block.
struct RankBlock {
  const uint16_t* positions;  // of its entries
  const uint8_t* values;
  int entries;
  bool poisons;               // non-finite entries were lost: the range's first element becomes NaN
  uint16_t part[kWarps + 1];  // the first of the entries that each warp adds
};

struct Shared {
  RangeTiles::Tile block;
  RankBlock ranks[Policy::kRanks];
};

// By one thread: finds a rank's entries for this block. Returns the status bits known so far.
__device__ int32_t find_entries(const ScatterUnpackArgs& args, const PayloadLayout& layout,
                                const uint8_t* payload, const RangeTiles::Tile& block,
                                RankBlock& found) {
  found.entries = 0;
  found.poisons = false;
  // Read along with the header, in one round trip to memory. An empty range has one start.
  const auto* starts = reinterpret_cast<const uint32_t*>(payload + layout.starts) + block.index;
  const uint32_t first = starts[0], end = starts[block.range_numel > 0 ? 1 : 0];
  const auto header = *reinterpret_cast<const PayloadHeader*>(payload);
  if (!header_ok(header, block.range_numel, args.capacity, args.value_dtype)) return kStatusHeader;
  found.poisons = lost_non_finite(header) && block.index == 0 && block.range_numel > 0;
  if (first > end || end > header.count || (block.index == 0 && first != 0) ||
      (block.last && end != header.count)) {
    return kStatusStarts;
  }
  // More entries than elements cannot ascend: bad without looking.
  if (end - first > block.bounds.end - block.bounds.begin) return kStatusPositions;
  found.positions = reinterpret_cast<const uint16_t*>(payload + layout.positions) + first;
  found.values = payload + layout.values + first * itemsize(args.value_dtype);
  found.entries = static_cast<int>(end - first);
  return 0;
}

// By one warp: whether the positions ascend strictly within the block.
__device__ bool positions_ok(const RankBlock& rank, int length) {
  bool bad = false;
  for (int i = lane_index(); i < rank.entries; i += kWarpSize) {
    bad |= rank.positions[i] >= length || (i > 0 && rank.positions[i] <= rank.positions[i - 1]);
  }
  return !__any_sync(kFullWarp, bad);
}

// By one warp: notes where in the first `entries` each warp's entries begin.
__device__ void divide(RankBlock& rank, int entries) {
  for (int i = lane_index(); i <= entries; i += kWarpSize) {
    const int before = i == 0 ? -1 : rank.positions[i - 1] / kPart;
    const int part = i == entries ? kWarps : rank.positions[i] / kPart;
    for (int p = before + 1; p <= part; ++p) rank.part[p] = static_cast<uint16_t>(i);
  }
}

// By one warp, for its own elements: adds the ranks in order. The entries of several ranks are read
// before the first is added, because each read takes as long as hundreds of additions.
template <typename Value>
__device__ void add(const RankBlock* ranks, int num_ranks, float* sums) {
  const int warp = warp_index(), lane = lane_index();
  for (int begin = 0; begin < num_ranks; begin += Policy::kInFlight) {
    int entry[Policy::kInFlight], end[Policy::kInFlight], position[Policy::kInFlight];
    float value[Policy::kInFlight];
#pragma unroll
    for (int r = 0; r < Policy::kInFlight; ++r) {
      entry[r] = end[r] = 0;
      if (begin + r >= num_ranks) continue;
      const RankBlock& rank = ranks[begin + r];
      entry[r] = rank.part[warp] + lane;
      end[r] = rank.part[warp + 1];
      if (entry[r] >= end[r]) continue;
      position[r] = rank.positions[entry[r]];
      value[r] = to_float(reinterpret_cast<const Value*>(rank.values)[entry[r]]);
    }
#pragma unroll
    for (int r = 0; r < Policy::kInFlight; ++r) {
      if (entry[r] < end[r]) sums[position[r]] = __fadd_rn(sums[position[r]], value[r]);
      for (int i = entry[r] + kWarpSize; i < end[r]; i += kWarpSize) {
        const RankBlock& rank = ranks[begin + r];
        float& sum = sums[rank.positions[i]];
        sum = __fadd_rn(sum, to_float(reinterpret_cast<const Value*>(rank.values)[i]));
      }
      __syncwarp();
    }
  }
}

template <typename Out>
__device__ Out finish(float sum, Out base, bool accumulate, float factor) {
  return round_to<Out>(__fadd_rn(accumulate ? to_float(base) : 0.0f, __fmul_rn(factor, sum)));
}

// By one warp: writes its own elements, out[0, length).
template <typename Out>
__device__ void write(Out* out, int length, bool aligned, const float* sums, bool accumulate,
                      float factor) {
  constexpr int kVector = 16 / sizeof(Out);
  const int lane = lane_index();
  const int in_vectors = aligned ? length / kVector * kVector : 0;
  for (int i = lane * kVector; i < in_vectors; i += kWarpSize * kVector) {
    Out x[kVector] = {};
    if (accumulate) stream_in(out + i, x);
#pragma unroll
    for (int e = 0; e < kVector; ++e) x[e] = finish(sums[i + e], x[e], accumulate, factor);
    stream_out(out + i, x);
  }
  for (int i = in_vectors + lane; i < length; i += kWarpSize) {
    out[i] = finish(sums[i], accumulate ? out[i] : Out{}, accumulate, factor);
  }
}

template <typename Value, typename Out>
__global__ void __launch_bounds__(Policy::kThreads, Policy::kMinBlocks)
    scatter_unpack_kernel(ScatterUnpackArgs args, RangeTiles blocks, PayloadLayout layout,
                          bool aligned) {
  DCT_SHARED(Shared, shared);
  DCT_DYNAMIC_SHARED(float, sums);
  RankBlock* ranks = shared.ranks;
  const RangeTiles::Tile& block = shared.block;
  const int warp = warp_index(), lane = lane_index();
  if (thread_index() == 0) shared.block = blocks.locate(blockIdx.x);
  for (int i = lane; i < kPart; i += kWarpSize) sums[warp * kPart + i] = 0.0f;
  for (int64_t begin = 0; begin < args.ranks; begin += Policy::kRanks) {
    const int64_t left = args.ranks - begin;
    const int num_ranks = left < Policy::kRanks ? static_cast<int>(left) : Policy::kRanks;
    __syncthreads();  // the block is located, and the ranks before are added
    if (thread_index() < num_ranks) {
      const int64_t rank = begin + thread_index();
      const uint8_t* payload = args.payloads + (rank * args.ranges + block.range) * layout.nbytes;
      const int32_t status = find_entries(args, layout, payload, block, ranks[thread_index()]);
      if (status != 0) atomicOr(&args.status[rank], status);
    }
    __syncthreads();
    const int length = static_cast<int>(block.bounds.end - block.bounds.begin);
    for (int r = warp; r < num_ranks; r += kWarps) {
      const bool ok = positions_ok(ranks[r], length);
      if (!ok && lane == 0) atomicOr(&args.status[begin + r], kStatusPositions);
      divide(ranks[r], ok ? ranks[r].entries : 0);
    }
    __syncthreads();
    add<Value>(ranks, num_ranks, sums);
    for (int r = 0; thread_index() == 0 && r < num_ranks; ++r) {
      if (ranks[r].poisons) sums[0] = bits_to_float(kFloat32Nan);
    }
    __syncwarp();
  }
  __syncthreads();  // the block is located, even if there are no ranks
  const int offset = warp * kPart;
  const int64_t begin = block.bounds.begin + offset;
  const int length = static_cast<int>(min(block.bounds.end - begin, int64_t{kPart}));
  const float factor =
      args.out_scale != nullptr ? __fmul_rn(args.scale, *args.out_scale) : args.scale;
  auto* out = static_cast<Out*>(args.out) + begin;
  if (length > 0) write(out, length, aligned, sums + offset, args.accumulate, factor);
}

template <typename Value, typename Out>
cudaError_t run(const ScatterUnpackArgs& args, cudaStream_t stream) {
  const RangeTiles blocks(args.numel, args.ranges, kBlock);
  if (blocks.total > kMaxGrid) return cudaErrorInvalidValue;
  const cudaError_t opted_in = cudaFuncSetAttribute(
      scatter_unpack_kernel<Value, Out>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSumBytes);
  if (opted_in != cudaSuccess) return opted_in;
  const PayloadLayout layout =
      payload_layout(args.numel, args.capacity, args.value_dtype, args.ranges);
  return launch(scatter_unpack_kernel<Value, Out>, dim3(static_cast<unsigned>(blocks.total)),
                Policy::kThreads, kSumBytes, stream, args, blocks, layout,
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
