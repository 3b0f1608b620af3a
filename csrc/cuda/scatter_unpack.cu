// scatter_unpack.cu -- the sum of all ranks' payloads, scattered into a dense tensor.
//
// A thread block owns one payload block of the output, 16,384 elements, in shared memory; in it
// each warp owns 2,048. It first checks what every rank sent for the block, and notes where the
// entries of each warp begin. Then each warp, on its own, adds its entries rank after rank and
// writes its part of the output once.
#include "detail/launch.cuh"
#include "detail/range_tiles.cuh"
#include "detail/sections.cuh"
#include "detail/vectors.cuh"
#include "detail/warp.cuh"
#include "scatter_unpack.cuh"

namespace dct::cuda {
namespace {

struct Policy {
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 3;  // of 67 KB of shared memory each
  static constexpr int kRanks = 64;     // checked at a time
  static constexpr int kInFlight = 8;   // times 32 entries that a warp reads before it uses them
};
constexpr int kWarps = Policy::kThreads / kWarpSize;
constexpr int kPart = kBlock / kWarps;  // elements a warp owns
constexpr size_t kSumBytes = kBlock * sizeof(float);
template <typename Value>
constexpr bool kE3M0 = std::is_same_v<Value, E3M0>;
static_assert(kSubBlock % kPart == 0, "a warp's elements are in one sub-block");

// What one rank sent for this block.
struct RankBlock {
  const uint16_t* positions;  // of its entries; of e3m0 these are all of an entry
  const uint8_t* values;
  int entries;
  bool poisons;               // non-finite entries were lost: the range's first element becomes NaN
  uint16_t part[kWarps + 1];  // the first of the entries that each warp adds
  uint16_t sub_starts[kSubBlocks - 1];  // of e3m0, and the scale's biased exponent
  uint16_t scale;
};

// The position in the block of entry `i`, as it was read.
template <typename Value>
__device__ int position_of(const RankBlock& rank, int i, uint16_t read) {
  if constexpr (!kE3M0<Value>) return read;
  int sub_block = 0;
  for (uint16_t start : rank.sub_starts) sub_block += i >= start;
  return sub_block * int{kSubBlock} + (read >> 4);
}

struct Shared {
  RangeTiles::Tile block;
  RankBlock ranks[Policy::kRanks];
};

// By one thread: finds a rank's entries for this block. Returns the status bits known so far.
template <typename Value>
__device__ int32_t find_entries(const ScatterUnpackArgs& args, const Sections& layout,
                                const uint8_t* payload, const RangeTiles::Tile& block,
                                RankBlock& found) {
  found.entries = 0;
  found.poisons = false;
  // Read along with the header, in one round trip to memory. An empty range has one start.
  const auto* starts = reinterpret_cast<const uint32_t*>(payload + layout.starts) + block.index;
  const uint32_t first = starts[0], end = starts[block.range_numel > 0 ? 1 : 0];
  if constexpr (kE3M0<Value>) {
    const auto* sub_starts = reinterpret_cast<const uint16_t*>(payload + layout.sub_starts);
    for (int q = 0; q < kSubBlocks - 1; ++q) {
      found.sub_starts[q] =
          block.range_numel > 0 ? sub_starts[(kSubBlocks - 1) * block.index + q] : 0;
    }
  }
  const auto header = *reinterpret_cast<const PayloadHeader*>(payload);
  const bool ok = kE3M0<Value>
                      ? e3m0_header_ok(header, block.range_numel, args.capacity)
                      : header_ok(header, block.range_numel, args.capacity, args.value_dtype);
  if (!ok) return kStatusHeader;
  // Of e3m0 no entry is non-finite; of the others one that is may not have fit.
  const bool lost = kE3M0<Value> ? (header.flags & kFlagNonFinite) != 0 : lost_non_finite(header);
  found.poisons = lost && block.index == 0 && block.range_numel > 0;
  if (first > end || end > header.count || (block.index == 0 && first != 0) ||
      (block.last && end != header.count)) {
    return kStatusStarts;
  }
  if constexpr (kE3M0<Value>) {
    found.scale = static_cast<uint16_t>(header.reserved[0]);
    uint32_t before = 0;
    for (uint32_t start : found.sub_starts) {
      if (start < before || start > end - first) return kStatusStarts;
      before = start;
    }
  }
  // More entries than elements cannot ascend: bad without looking.
  if (end - first > block.bounds.end - block.bounds.begin) return kStatusPositions;
  found.positions = reinterpret_cast<const uint16_t*>(payload + layout.positions) + first;
  found.values = payload + layout.values + first * itemsize(args.value_dtype);
  found.entries = static_cast<int>(end - first);
  return 0;
}

// By one warp: whether a rank's positions ascend strictly within the block (those of e3m0, in each
// sub-block, if they do in the block); notes where each warp's entries begin. Several rounds of
// positions, each with the one before it, are read before the first is looked at; whoever has none
// reads the last again.
template <typename Value>
__device__ bool divide(RankBlock& rank, int length) {
  constexpr int kRounds = Policy::kInFlight;
  const int lane = lane_index(), last = rank.entries - 1;
  for (int begin = lane; begin - lane <= last; begin += kRounds * kWarpSize) {
    int position[kRounds], below[kRounds];
#pragma unroll
    for (int q = 0; q < kRounds; ++q) {
      const int i = min(begin + q * kWarpSize, last), before = max(i - 1, 0);
      position[q] = position_of<Value>(rank, i, rank.positions[i]);
      below[q] = position_of<Value>(rank, before, rank.positions[before]);
    }
    bool bad = false;
#pragma unroll
    for (int q = 0; q < kRounds; ++q) {
      bad |= (position[q] >= length) | ((begin + q > 0) & (last > 0) & (position[q] <= below[q]));
    }
    if (__any_sync(kFullWarp, bad)) return false;
#pragma unroll
    for (int q = 0; q < kRounds; ++q) {
      const int i = begin + q * kWarpSize;
      if (i > last) break;
      const int before = i == 0 ? -1 : below[q] / kPart;
      const int part = position[q] / kPart;
      for (int p = before + 1; p <= part; ++p) rank.part[p] = static_cast<uint16_t>(i);
    }
  }
  const int parts = last < 0 ? 0 : position_of<Value>(rank, last, rank.positions[last]) / kPart + 1;
  if (parts + lane <= kWarps) rank.part[parts + lane] = static_cast<uint16_t>(last + 1);
  return true;
}

// What a lane has read of an entry, and what it is.
template <typename Value>
struct Entry {
  int position = -1;  // none
  Value value[1];

  __device__ void read(const RankBlock& from, int i) {
    uint16_t read[1];
    stream_in(from.positions + i, read);
    stream_in(reinterpret_cast<const Value*>(from.values) + i, value);
    position = read[0];
  }
  __device__ bool is_there() const { return position >= 0; }
  __device__ void add_to(float* sums) const {
    sums[position] = __fadd_rn(sums[position], to_float(value[0]));
  }
};
template <>
struct Entry<E3M0> {
  int bits = -1;
  uint32_t scale;

  __device__ void read(const RankBlock& from, int i) {
    uint16_t read[1];
    stream_in(from.positions + i, read);
    bits = read[0];
    scale = from.scale;
  }
  __device__ bool is_there() const { return bits >= 0; }
  __device__ void add_to(float* sums) const {
    float& sum = sums[warp_index() * kPart / kSubBlock * kSubBlock + (bits >> 4)];
    sum = __fadd_rn(sum, E3M0Scale(scale).value(bits));
  }
};

// By one warp, for its own elements: adds the ranks in order, 32 entries of one rank at a time.
// Several times 32 are read before the first are added, because each read takes as long as hundreds
// of additions; they are converted where they are added, because a conversion waits for what it
// converts.
template <typename Value>
__device__ void add(const RankBlock* ranks, int num_ranks, float* sums) {
  const int warp = warp_index(), lane = lane_index();
  int rank = 0, first = ranks[0].part[warp];
  while (rank < num_ranks) {
    Entry<Value> entries[Policy::kInFlight];
#pragma unroll
    for (int q = 0; q < Policy::kInFlight; ++q) {
      if (rank == num_ranks) continue;
      const RankBlock& from = ranks[rank];
      const int end = from.part[warp + 1];
      if (first + lane < end) entries[q].read(from, first + lane);
      first += kWarpSize;
      if (first >= end && ++rank < num_ranks) first = ranks[rank].part[warp];
    }
#pragma unroll
    for (int q = 0; q < Policy::kInFlight; ++q) {
      if (entries[q].is_there()) entries[q].add_to(sums);
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
    scatter_unpack_kernel(ScatterUnpackArgs args, RangeTiles blocks, Sections layout,
                          bool aligned) {
  DCT_SHARED(Shared, shared);
  DCT_DYNAMIC_SHARED(float, sums);
  RankBlock* ranks = shared.ranks;
  const RangeTiles::Tile& block = shared.block;
  const int warp = warp_index(), lane = lane_index();
  if (thread_index() == 0) shared.block = blocks.locate(blockIdx.x);
  auto* own = reinterpret_cast<float4*>(sums + warp * kPart);
  for (int i = lane; i < kPart / 4; i += kWarpSize) own[i] = make_float4(0, 0, 0, 0);
  __syncthreads();
  for (int64_t begin = 0; begin < args.ranks; begin += Policy::kRanks) {
    const int64_t left = args.ranks - begin;
    const int num_ranks = left < Policy::kRanks ? static_cast<int>(left) : Policy::kRanks;
    if (begin > 0) __syncthreads();  // the ranks before are added
    if (thread_index() < num_ranks) {
      const int64_t rank = begin + thread_index();
      const uint8_t* payload = args.payloads + (rank * args.ranges + block.range) * layout.nbytes;
      const int32_t status =
          find_entries<Value>(args, layout, payload, block, ranks[thread_index()]);
      if (status != 0) atomicOr(&args.status[rank], status);
    }
    __syncthreads();
    const int length = static_cast<int>(block.bounds.end - block.bounds.begin);
    for (int r = warp; r < num_ranks; r += kWarps) {
      if (divide<Value>(ranks[r], length)) continue;
      __syncwarp();  // what was noted of a bad block is forgotten
      if (lane <= kWarps) ranks[r].part[lane] = 0;
      if (lane == 0) atomicOr(&args.status[begin + r], kStatusPositions);
    }
    __syncthreads();
    add<Value>(ranks, num_ranks, sums);
    for (int r = 0; thread_index() == 0 && r < num_ranks; ++r) {
      if (ranks[r].poisons) sums[0] = bits_to_float(kFloat32Nan);
    }
    __syncwarp();
  }
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
  const auto kernel = scatter_unpack_kernel<Value, Out>;
  const cudaError_t opted_in =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSumBytes);
  if (opted_in != cudaSuccess) return opted_in;
  const cudaError_t carved = cudaFuncSetAttribute(
      kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (carved != cudaSuccess) return carved;
  const Sections layout(args.numel, args.capacity, args.value_dtype, args.ranges);
  return launch(kernel, dim3(static_cast<unsigned>(blocks.total)), Policy::kThreads, kSumBytes,
                stream, args, blocks, layout, is_aligned(args.out, 16));
}

}  // namespace

cudaError_t scatter_unpack(const ScatterUnpackArgs& args, cudaStream_t stream) {
  if (args.ranks > 0) {
    const cudaError_t cleared =
        cudaMemsetAsync(args.status, 0, sizeof(int32_t) * args.ranks, stream);
    if (cleared != cudaSuccess) return cleared;
  }
  const auto run_as = [&](auto value) {
    return dispatch(args.out_dtype,
                    [&](auto out) { return run<decltype(value), decltype(out)>(args, stream); });
  };
  if (args.value_dtype == DType::kE3M0) return run_as(E3M0{});
  return dispatch_payload_value(args.value_dtype, run_as);
}

}  // namespace dct::cuda
