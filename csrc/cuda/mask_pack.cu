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
#include <limits>

#include "detail/elements.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

struct MaskPackPolicy {
  // Elements that a warp of the first kernel loads together. Long contiguous loads matter more than
  // occupancy: on an H200, half as many elements at twice the occupancy are 10 % slower.
  static constexpr int kPass = 1024;
  // At most 128 registers per thread
  static constexpr int kStageMinBlocks = 2;
  static constexpr int kScatterMinBlocks = 2;
  static constexpr uint32_t kFlushAt = 48;  // buffered vectors from which on a warp stores them
  static constexpr int kInFlight = 6;  // entries that a lane of the second kernel loads together
  // Large tiles are used if there are at least this many per resident block.
  static constexpr int kLargeTiles = 8;
  // A slot holds one and a half times a warp's share of the capacity, and a few entries more.
  static constexpr int kMoreInSlot = 24, kMostInSlot = 256;
};
constexpr int kPass = MaskPackPolicy::kPass;
constexpr int kVectors = kPass / kWarpVector;  // of each tensor that a lane loads together
constexpr int kLaneElements = kVectors * kVectorElements;
static_assert(kLaneElements == 32, "one bit of a mask for each element of a lane");
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The result of the first kernel for one warp. Elements after the staged passes are unchanged.
struct WarpCount {
  uint32_t kept : 12;    // entries that pass the threshold
  uint32_t staged : 12;  // how many of them, from the first on, are stored in the warp's slot
  uint32_t passes : 8;   // number of passes whose entries are staged
};

// Scratch memory, which need not be cleared: the first kernel writes all that the second reads.
struct Staging {
  int warp_tile;           // elements per warp; a tile is kWarps times as long and divides kBlock
  uint32_t slot_capacity;  // entries per slot, a multiple of 8
  uint32_t* totals;        // [tiles], aligned to 16 bytes: entries kept | any non-finite << 31
  WarpCount* counts;       // [tiles, kWarps], right after the totals
  uint8_t* slots;          // [tiles, kWarps]: u16 positions[slot_capacity], value[slot_capacity]

  __device__ Entries slot(int64_t tile, uint32_t warp, DType value_dtype) const {
    const auto bytes = slot_capacity * static_cast<uint32_t>(2 + itemsize(value_dtype));
    uint8_t* const entries = slots + tile * (kWarps * bytes) + warp * bytes;
    return {reinterpret_cast<uint16_t*>(entries), entries + 2 * slot_capacity, slot_capacity,
            value_dtype};
  }
};

// The threshold of a range: at least the smallest subnormal, so zeros never pass.
__device__ float threshold_of(const MaskPackArgs& args, int range) {
  return fmaxf(args.threshold[range], bits_to_float(1));
}

// Both kernels use this function for elements that are not staged, so their selections are equal.
__device__ bool passes(float sum, float threshold) { return !(fabsf(sum) < threshold); }

// Buffers compacted vectors in element order until full warps can process them. The buffer is
// flushed before the loads of a pass, when registers are free. A whole pass always fits.
constexpr uint32_t kBufferVectors = MaskPackPolicy::kFlushAt + kPass / kVectorElements;
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
      if (buffered >= MaskPackPolicy::kFlushAt) flush();
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
__global__ void __launch_bounds__(kThreads, MaskPackPolicy::kStageMinBlocks)
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

constexpr Word kMostSeen = std::numeric_limits<int32_t>::max();

// A sum of tile totals: entries kept and, from bit kKeptBits on, tiles with a non-finite entry.
constexpr int kKeptBits = 38;  // tensors have fewer than 2^38 elements
constexpr Word kKeptMask = (Word{1} << kKeptBits) - 1;

// One thread's part of the sum of totals [begin, end). `threads` threads read 16 bytes at a time.
__device__ Word sum_totals(const uint32_t* totals, unsigned begin, unsigned end, int thread,
                           int threads) {
  Word sum = 0;
#pragma unroll 8
  for (unsigned first = begin / 4 * 4 + 4 * thread; first < end; first += 4 * threads) {
    const uint4 four = *reinterpret_cast<const uint4*>(totals + first);
    const uint32_t words[] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      if (first + i - begin >= end - begin) continue;
      sum += (words[i] & 0xffff) | Word{words[i] >> 31} << kKeptBits;
    }
  }
  return sum;
}

// Restores the residual of an entry that does not fit. If the entry is not finite, the first kernel
// has already kept the old residual.
__device__ void restore_residual(float& residual, uint32_t bits, DType value_dtype) {
  if (!is_finite(payload_value(bits, value_dtype))) return;
  residual = restore(residual, bits, value_dtype);
}

// Copies the staged entries of a tile to the payload, 32 at a time across slots. Loads 32 *
// kInFlight entries before it stores the first, so a tile rarely takes more than one round trip to
// memory. Lane w < kWarps passes the number of entries in slot w, and the number of entries of the
// tile that precede them. By one warp.
__device__ void copy_slots(const MaskPackArgs& args, const Staging& staging, int64_t tile,
                           uint32_t staged, uint32_t preceding, float* residual,
                           const Entries& output) {
  constexpr int kInFlight = MaskPackPolicy::kInFlight;
  const uint32_t inclusive = warp_inclusive_sum(staged), begin = inclusive - staged;
  const uint32_t total = __shfl_sync(kFullWarp, inclusive, kWarps - 1);
  const uint32_t unstaged = preceding - begin;  // entries of earlier warps that are in no slot
  for (uint32_t first = 0; first < total; first += kInFlight * kWarpSize) {
    uint32_t at[kInFlight], position[kInFlight], bits[kInFlight];
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      if (first + a * kWarpSize >= total) break;
      const uint32_t i = first + a * kWarpSize + lane_index();
      int slot = 0;  // the last slot that begins at or before entry i; it is not empty
#pragma unroll
      for (int step = kWarps / 2; step > 0; step /= 2) {
        if (__shfl_sync(kFullWarp, begin, slot + step) <= i) slot += step;
      }
      const uint32_t entry = i - __shfl_sync(kFullWarp, begin, slot);
      at[a] = i + __shfl_sync(kFullWarp, unstaged, slot);
      if (i >= total) continue;
      const Entries from = staging.slot(tile, slot, args.value_dtype);
      position[a] = from.positions[entry];
      bits[a] = load_value(from.values, entry, args.value_dtype);
    }
#pragma unroll
    for (int a = 0; a < kInFlight; ++a) {
      if (first + a * kWarpSize + lane_index() >= total) break;
      if (at[a] < output.capacity) {
        output.put(at[a], position[a], bits[a]);
      } else {
        restore_residual(residual[position[a]], bits[a], args.value_dtype);
      }
    }
  }
}

// Compacts elements [begin, begin + length), which the first kernel only counted. Their residual
// and gradient are unchanged. Entries that exceed the capacity stay in the residual. By one warp.
template <typename Grad>
__device__ void pack_elements(const MaskPackArgs& args, float threshold, int64_t begin, int length,
                              const Entries& output) {
  uint32_t entry = 0;
  const auto pack = [&](int i, float sum, bool inside) {
    const bool keeps = inside && passes(sum, threshold);
    const unsigned lanes = __ballot_sync(kFullWarp, keeps);
    const uint32_t at = entry + __popc(lanes & ((1u << lane_index()) - 1));
    entry += __popc(lanes);
    if (!inside) return;
    float& residual = args.residual[begin + i];
    float remainder = sum;
    if (keeps && at < output.capacity) {
      const Split split_sum = split(sum, args.value_dtype);
      output.put(at, begin + i, split_sum.bits);
      remainder = split_sum.remainder;
    }
    residual = is_finite(sum) ? remainder : finite_or_zero(residual);
  };
  for_each_sum(args.residual + begin, static_cast<const Grad*>(args.grad) + begin,
               load_scale(args.inv_scale), length, pack);
}

// Scatters the tile that begins at element `begin`. Returns its number of entries.
template <typename Grad>
__device__ uint32_t scatter_tile(const MaskPackArgs& args, const Staging& staging, int64_t tile,
                                 WarpCount count, float threshold, int64_t begin, int length,
                                 const Entries& output) {
  const int lane = lane_index();
  const uint32_t inclusive = warp_inclusive_sum(uint32_t{count.kept});
  const uint32_t preceding = inclusive - count.kept;
  copy_slots(args, staging, tile, count.staged, preceding, args.residual + (begin - begin % kBlock),
             output);
  // The first kernel only counted the elements after the staged passes of a warp.
  const int done = lane * staging.warp_tile + count.passes * kPass;
  const int end = min(length, (lane + 1) * staging.warp_tile);
  unsigned unstaged = __ballot_sync(kFullWarp, lane < kWarps && done < end);
  for (; unstaged != 0; unstaged &= unstaged - 1) {
    const int w = __ffs(static_cast<int>(unstaged)) - 1;
    const int from = __shfl_sync(kFullWarp, done, w), to = __shfl_sync(kFullWarp, end, w);
    const uint32_t entry = __shfl_sync(kFullWarp, preceding + count.staged, w);
    pack_elements<Grad>(args, threshold, begin + from, to - from, output.after(entry));
  }
  return __shfl_sync(kFullWarp, inclusive, kWarps - 1);
}

// A block scatters consecutive tiles of one range, and each of its warps an equal part of them.
template <typename Grad>
__global__ void __launch_bounds__(kThreads, MaskPackPolicy::kScatterMinBlocks)
    mask_pack_scatter_kernel(MaskPackArgs args, RangeTiles tiles, PayloadLayout layout,
                             Staging staging, unsigned blocks_per_range, unsigned tiles_per_warp) {
  __shared__ Word warp_sums[kWarps];
  const int lane = lane_index(), warp = warp_index();
  const auto index = static_cast<int>(blockIdx.x / blocks_per_range);
  const unsigned range_begin = index * tiles.per_range;
  const unsigned range_end = range_begin + tiles.per_range;
  const unsigned block_tiles = kWarps * tiles_per_warp;
  const unsigned block_begin = range_begin + (blockIdx.x - index * blocks_per_range) * block_tiles;
  if (block_begin >= range_end) return;
  const unsigned first = min(block_begin + warp * tiles_per_warp, range_end);
  const unsigned last = min(first + tiles_per_warp, range_end);
  // Lane w < kWarps loads the counts of warp w of the first kernel. One tile is prefetched.
  const auto load_count = [&](unsigned t) {
    return t < last && lane < kWarps ? staging.counts[int64_t{t} * kWarps + lane] : WarpCount{};
  };
  WarpCount next = load_count(first);

  // The block sums the totals of earlier blocks. Each warp adds the totals of the block's lower
  // warps.
  const Word block_sum =
      warp_sum(sum_totals(staging.totals, range_begin, block_begin, thread_index(), kThreads));
  if (lane == 0) warp_sums[warp] = block_sum;
  __syncthreads();
  Word sum = sum_totals(staging.totals, block_begin, first, lane, kWarpSize);
  if (lane < kWarps) sum += warp_sums[lane];
  sum = warp_sum(sum);

  const Range range = tiles.bounds_of(index);
  uint8_t* payload = args.payload + index * layout.nbytes;
  auto* starts = reinterpret_cast<uint32_t*>(payload + layout.starts);
  // The last warp of a range has read the totals of all tiles, so its header is exact.
  if (block_begin + block_tiles >= range_end && warp == kWarps - 1) {
    const Word all = sum + warp_sum(sum_totals(staging.totals, first, last, lane, kWarpSize));
    const Word kept = all & kKeptMask;
    const int64_t numel = range.end - range.begin;
    const PayloadHeader header =
        payload_header(numel, args.capacity, args.value_dtype, kept, all != kept);
    if (lane == 0) {
      *reinterpret_cast<PayloadHeader*>(payload) = header;
      starts[num_blocks(numel)] = header.count;
      args.seen[index] = static_cast<int32_t>(min(kept, kMostSeen));
    }
  }

  const float threshold = threshold_of(args, index);
  const auto capacity = static_cast<uint32_t>(args.capacity);
  Entries output = {reinterpret_cast<uint16_t*>(payload + layout.positions),
                    payload + layout.values, capacity, args.value_dtype};
  output = output.after(sum & kKeptMask);
  for (unsigned t = first; t < last; ++t) {
    const WarpCount count = next;
    next = load_count(t + 1);
    const int64_t begin = range.begin + (t - range_begin) * tiles.tile;
    if (begin >= range.end) return;  // the other tiles are empty
    const int length = static_cast<int>(min(tiles.tile, range.end - begin));
    if (lane == 0 && begin % kBlock == 0) {
      starts[(begin - range.begin) / kBlock] = capacity - output.capacity;
    }
    output =
        output.after(scatter_tile<Grad>(args, staging, t, count, threshold, begin, length, output));
  }
}

RangeTiles tiles_of(const MaskPackArgs& args, const MaskPackSizes& sizes) {
  return {args.numel, args.ranges, range_length(args.numel, args.ranges),
          int64_t{sizes.warp_tile} * kWarps};
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
  const int64_t tiles_per_warp = ceil_div(
      tiles.per_range, int64_t{MaskPackPolicy::kScatterMinBlocks} * multiprocessors() * kWarps);
  const int64_t blocks_per_range = ceil_div(tiles.per_range, kWarps * tiles_per_warp);
  const PayloadLayout layout =
      payload_layout(args.numel, args.capacity, args.value_dtype, args.ranges);
  return launch(mask_pack_scatter_kernel<Grad>, blocks_per_range * args.ranges, kThreads, 0, stream,
                args, tiles, layout, staging, static_cast<unsigned>(blocks_per_range),
                static_cast<unsigned>(tiles_per_warp));
}

}  // namespace

MaskPackSizes mask_pack_sizes(const MaskPackArgs& args) {
  const int64_t large_tiles = args.numel / (2 * kPass * kWarps);
  const int64_t enough =
      MaskPackPolicy::kLargeTiles * MaskPackPolicy::kStageMinBlocks * multiprocessors();
  const int warp_tile = kPass * (large_tiles < enough ? 1 : 2);
  const int64_t share =
      args.numel > 0 ? ceil_div(warp_tile * args.capacity * args.ranges, args.numel) : 0;
  const int64_t entries = ceil_div(share + share / 2 + MaskPackPolicy::kMoreInSlot, 8) * 8;
  return {warp_tile, static_cast<int>(min(entries, int64_t{MaskPackPolicy::kMostInSlot}))};
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
