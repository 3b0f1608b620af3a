// mask_pack.cu -- error feedback, thresholding and stable stream compaction in two kernels.
//
// The first kernel reads every element once. A block processes one tile, which lies in one range,
// and each of its warps an equal part of the tile. A warp adds the gradient to the residual and
// compacts the entries that pass the range's threshold into its slot in scratch memory. It works in
// passes of 1,024 elements. If the entries of a pass do not fit the slot, this pass and the later
// ones are only counted. The same applies to elements that do not fill an aligned pass.
//
// When the second kernel runs, all counts are known. It copies the entries from the slots to the
// payload. It compacts the elements that the first kernel only counted, and it writes the headers.
// No block waits for another.
#include "detail/mask_pack_scatter.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

constexpr int kMinBlocks = 2;  // at most 128 registers per thread
constexpr int kVectorElements = 4;
constexpr int kWarpVector = kWarpSize * kVectorElements;  // elements of one vector load by a warp
// Vectors of each tensor that a lane loads together. Long contiguous loads matter more than
// occupancy: on an H200, half as many vectors at twice the occupancy are 10 % slower.
constexpr int kVectors = kPass / kWarpVector;
constexpr int kLaneElements = kVectors * kVectorElements;
static_assert(kLaneElements == 32, "one bit of a mask for each element of a lane");
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Buffers compacted vectors in element order until full warps can process them. The buffer is
// flushed before the loads of a pass, when registers are free. A whole pass always fits.
constexpr uint32_t kFlushAt = 48, kBufferVectors = kFlushAt + kPass / kVectorElements;
struct CompactionBuffer {
  alignas(16) float sums[kBufferVectors][kVectorElements];
  uint32_t offset_and_mask[kBufferVectors];  // offset in the warp's elements << 2 | mask of entries
};

// Stages the elements of one warp, pass by pass: load, accumulate, compare. If one of the two
// vectors of a 32-byte sector contains an entry, both are buffered until a flush stores them. The
// vectors of other sectors are stored immediately. Until the flush, memory holds the old residual,
// which stays if the sum is not finite. Whole sectors are stored, because memory with error
// correction reads a sector before it writes a part of it.
template <typename Grad>
struct WarpStager {
  using Sums = float[kVectors][kVectorElements];  // of one lane

  const MaskPackArgs& args;
  CompactionBuffer& buffer;
  float threshold;
  int64_t begin;
  int length;
  Entries slot;
  uint32_t kept = 0, staged = 0, buffered = 0;
  bool non_finite = false;

  // Returns the number of staged passes. Staging stops at the first pass whose entries do not fit.
  // Nothing of that pass is stored, because the second kernel must find it unchanged. If the
  // threshold is infinite, no pass is staged, because mark() needs a finite threshold.
  __device__ uint32_t run(bool aligned) {
    const int end = aligned && threshold < kInfinity ? length / kPass * kPass : 0;
    const float scale = load_scale(args.inv_scale);
    const int lane = lane_index() * kVectorElements;
    float* residual = args.residual + begin + lane;
    const Grad* grad = static_cast<const Grad*>(args.grad) + begin + lane;
    int pass = 0;
    for (; pass < end; pass += kPass, residual += kPass, grad += kPass) {
      if (buffered >= kFlushAt) flush();
      if (pass + kPass < end) prefetch(pass + kPass);
      Sums sums;
      Grad gradient[kVectors][kVectorElements];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        stream_in(residual + v * kWarpVector, sums[v]);
        stream_in(grad + v * kWarpVector, gradient[v]);
      }
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i) {
        float& sum = sums[i / kVectorElements][i % kVectorElements];
        sum = accumulate(sum, gradient[i / kVectorElements][i % kVectorElements], scale);
      }
      const uint32_t mask = mark(sums);
      const uint32_t kept_in_pass = __reduce_add_sync(kFullWarp, __popc(mask));
      if (kept + kept_in_pass > slot.capacity) break;
      kept += kept_in_pass;
      // The vectors of two neighboring lanes form a sector.
      const uint32_t held = mask | __shfl_xor_sync(kFullWarp, mask, 1);
      if (kept_in_pass != 0) compact(sums, mask, held, pass + lane);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if ((held >> (4 * v) & 15) == 0) stream_out(residual + v * kWarpVector, sums[v]);
      }
    }
    flush();
    // The second kernel packs the rest. It needs the count of the rest before it starts.
    const auto count = [&](int, float sum, bool inside) {
      const bool keeps = inside && passes(sum, threshold);
      kept += __popc(__ballot_sync(kFullWarp, keeps));
      non_finite |= keeps && !is_finite(sum);
    };
    for_each_sum(args.residual + begin + pass, static_cast<const Grad*>(args.grad) + begin + pass,
                 scale, length - pass, count);
    return pass / kPass;
  }

  // Prefetches a pass into the L2 cache, which needs no registers. A lane fetches one or two lines.
  __device__ void prefetch(int pass) const {
    const auto* residual = reinterpret_cast<const char*>(args.residual + begin + pass);
    const auto* grad =
        reinterpret_cast<const char*>(static_cast<const Grad*>(args.grad) + begin + pass);
    const int at = lane_index() * kCacheLine;
    if (at < kPass * int{sizeof(float)}) prefetch_line(residual + at);
    if (at < kPass * int{sizeof(Grad)}) prefetch_line(grad + at);
  }

  // Bit 4 * v + e is set if sums[v][e] passes. The sign of |sum| - threshold shows whether the sum
  // passes: the difference is negative only if it does not, and a positive NaN if the sum is NaN.
  // This test takes one addition and one shift per element, and relies on gradual underflow.
  __device__ uint32_t mark(const Sums& sums) const {
    uint32_t below = 0;
#pragma unroll
    for (int i = kLaneElements - 1; i >= 0; --i) {
      const float sum = sums[i / kVectorElements][i % kVectorElements];
      below = __funnelshift_l(float_to_bits(__fsub_rn(fabsf(sum), threshold)), below, 1);
    }
    return ~below;
  }

  __device__ void compact(const Sums& sums, uint32_t mask, uint32_t held, int offset) {
    const uint32_t below = (1u << lane_index()) - 1;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const bool is_held = (held >> (4 * v) & 15) != 0;
      const uint32_t lanes = __ballot_sync(kFullWarp, is_held);
      if (is_held) {
        const uint32_t at = buffered + __popc(lanes & below);
        memcpy(buffer.sums[at], sums[v], sizeof(sums[v]));
        buffer.offset_and_mask[at] = (offset + v * kWarpVector) << 2 | (mask >> (4 * v) & 15);
      }
      buffered += __popc(lanes);
    }
  }

  // Moves the buffered entries to the warp's slot and their remainders to the residual.
  __device__ void flush() {
    __syncwarp();
    for (uint32_t first = 0; first < buffered; first += kWarpSize) {
      const uint32_t at = first + lane_index();
      const uint32_t offset_and_mask = at < buffered ? buffer.offset_and_mask[at] : 0;
      const uint32_t offset = offset_and_mask >> 4 << 2;
      const uint32_t count = __popc(offset_and_mask & 15), inclusive = warp_inclusive_sum(count);
      uint32_t entry = staged + inclusive - count;
      staged += __shfl_sync(kFullWarp, inclusive, kWarpSize - 1);
      if (at >= buffered) continue;
      float* residual = args.residual + begin + offset;
      float (&sums)[kVectorElements] = buffer.sums[at];
      for (uint32_t mask = offset_and_mask & 15; mask != 0; mask &= mask - 1) {
        const int e = __ffs(static_cast<int>(mask)) - 1;
        const bool finite = is_finite(sums[e]);
        const Split split_sum = split(sums[e], args.value_dtype);
        slot.put(entry++, begin + offset + e, split_sum.bits);
        sums[e] = finite ? split_sum.remainder : finite_or_zero(residual[e]);
        non_finite |= !finite;
      }
      stream_out(residual, sums);
    }
    __syncwarp();
    buffered = 0;
  }
};

template <typename Grad>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    mask_pack_stage_kernel(MaskPackArgs args, RangeTiles tiles, Staging staging, bool aligned) {
  __shared__ CompactionBuffer buffers[kWarps];
  __shared__ uint32_t block_sum;  // kept | warps << 16 | warps with a non-finite entry << 24
  const int warp = warp_index();
  const unsigned index = blockIdx.x * kWarps + warp;
  const RangeTiles::Tile tile = tiles.locate(blockIdx.x);
  const int64_t begin = tile.bounds.begin + warp * staging.warp_tile;
  const int length = min(static_cast<int>(tile.bounds.end - begin), staging.warp_tile);
  const Entries slot = staging.slot(blockIdx.x, warp, args.value_dtype);
  const float threshold = threshold_of(args, tile.range);
  WarpStager<Grad> stager = {args, buffers[warp], threshold, begin, length, slot};
  if (length >= kPass) stager.prefetch(0);  // before the barrier
  if (thread_index() == 0) block_sum = 0;
  __syncthreads();

  const uint32_t staged_passes = stager.run(aligned);
  const bool non_finite = __any_sync(kFullWarp, stager.non_finite) != 0;
  if (lane_index() != 0) return;
  staging.counts[index] = {stager.kept, stager.staged, staged_passes};
  // The last warp to arrive gets the total of the tile, so no warp waits for the slowest warp.
  const uint32_t added = stager.kept | 1u << 16 | uint32_t{non_finite} << 24;
  const uint32_t sum = atomicAdd(&block_sum, added) + added;
  if ((sum >> 16 & 255) == kWarps) {
    staging.totals[blockIdx.x] = (sum & 0xffff) | uint32_t{sum >> 24 != 0} << 31;
  }
}

RangeTiles tiles_of(const MaskPackArgs& args, const MaskPackSizes& sizes) {
  return {args.numel, args.ranges, int64_t{sizes.warp_tile} * kWarps};
}

int64_t slot_bytes(const MaskPackArgs& args, const MaskPackSizes& sizes) {
  return sizes.slot_capacity * (2 + itemsize(args.value_dtype));
}

template <typename Grad>
cudaError_t run(const MaskPackArgs& args, const RangeTiles& tiles, const Staging& staging,
                cudaStream_t stream) {
  const bool aligned = is_aligned(args.residual, kVectorElements * sizeof(float)) &&
                       is_aligned(args.grad, kVectorElements * sizeof(Grad));
  const cudaError_t staged = launch(mask_pack_stage_kernel<Grad>, tiles.total, kThreads, 0, stream,
                                    args, tiles, staging, aligned);
  if (staged != cudaSuccess) return staged;
  // The number of blocks per range is at most the number of resident blocks.
  const int64_t tiles_in_range = max(max(tiles.tiles_per_full, tiles.short_tiles), 1u);
  const int64_t tiles_per_warp =
      ceil_div(tiles_in_range, int64_t{kScatterMinBlocks} * multiprocessors() * kWarps);
  const int64_t blocks_per_range = ceil_div(tiles_in_range, kWarps * tiles_per_warp);
  const PayloadLayout layout =
      payload_layout(args.numel, args.capacity, args.value_dtype, args.ranges);
  return launch(mask_pack_scatter_kernel<Grad>, blocks_per_range * args.ranges, kThreads, 0, stream,
                args, tiles, layout, staging, static_cast<unsigned>(blocks_per_range),
                static_cast<unsigned>(tiles_per_warp));
}

}  // namespace

MaskPackSizes mask_pack_sizes(const MaskPackArgs& args) {
  // Small tensors get small tiles. Large tiles are used if there are at least 8 per resident block.
  const int64_t large_tiles = args.numel / (2 * kPass * kWarps);
  const int warp_tile = kPass * (large_tiles < 8 * kMinBlocks * multiprocessors() ? 1 : 2);
  // A slot holds one and a half times a warp's share of the capacity, and a few entries more, but
  // at most 256 entries. The second kernel packs the elements of passes that do not fit.
  const int64_t share =
      args.numel > 0 ? ceil_div(warp_tile * args.capacity * args.ranges, args.numel) : 0;
  return {warp_tile, static_cast<int>(min(ceil_div(share + share / 2 + 24, 8) * 8, int64_t{256}))};
}

int64_t mask_pack_scratch_bytes(const MaskPackArgs& args, const MaskPackSizes& sizes) {
  const int64_t warp_bytes = slot_bytes(args, sizes) + int64_t{sizeof(WarpCount)};
  return tiles_of(args, sizes).total * (kWarps * warp_bytes + int64_t{sizeof(uint32_t)});
}

cudaError_t mask_pack(const MaskPackArgs& args, const MaskPackSizes& sizes, void* scratch,
                      cudaStream_t stream) {
  const RangeTiles tiles = tiles_of(args, sizes);
  if (tiles.total > kMaxGrid / kWarps) return cudaErrorInvalidValue;
  auto* slots = static_cast<uint8_t*>(scratch);
  auto* totals =
      reinterpret_cast<uint32_t*>(slots + tiles.total * kWarps * slot_bytes(args, sizes));
  auto* counts = reinterpret_cast<WarpCount*>(totals + tiles.total);
  const Staging staging = {sizes.warp_tile, static_cast<uint32_t>(sizes.slot_capacity), totals,
                           counts, slots};
  return dispatch(args.grad_dtype,
                  [&](auto grad) { return run<decltype(grad)>(args, tiles, staging, stream); });
}

}  // namespace dct::cuda
