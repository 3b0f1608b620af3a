#pragma once

// The second kernel of mask_pack, which moves entries from the slots to the payload.

#include <limits>

#include "mask_pack_staging.cuh"

namespace dct::cuda {

constexpr int kScatterMinBlocks = 2;  // at most 128 registers per thread
constexpr Word kMostSeen = std::numeric_limits<int32_t>::max();

// A sum of tile totals: entries kept and, from bit kKeptBits on, tiles with a non-finite entry.
constexpr int kKeptBits = 38;  // tensors have fewer than 2^38 elements
constexpr Word kKeptMask = (Word{1} << kKeptBits) - 1;

// One thread's part of the sum of totals [begin, end). `threads` threads read 16 bytes at a time.
__device__ inline Word sum_totals(const uint32_t* totals, unsigned begin, unsigned end, int thread,
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
__device__ inline void restore_residual(float& residual, uint32_t bits, DType value_dtype) {
  if (!is_finite(payload_value(bits, value_dtype))) return;
  residual = restore(residual, bits, value_dtype);
}

// Copies the staged entries of a tile to the payload, 32 at a time across slots. Loads 32 *
// kInFlight entries before it stores the first, so a tile rarely takes more than one round trip to
// memory. Lane w < kWarps passes the number of entries in slot w, and the number of entries of the
// tile that precede them. By one warp.
__device__ inline void copy_slots(const MaskPackArgs& args, const Staging& staging, int64_t tile,
                                  uint32_t staged, uint32_t preceding, float* residual,
                                  const Entries& output) {
  constexpr int kInFlight = 6;
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
__global__ void __launch_bounds__(kThreads, kScatterMinBlocks)
    mask_pack_scatter_kernel(MaskPackArgs args, RangeTiles tiles, PayloadLayout layout,
                             Staging staging, unsigned blocks_per_range, unsigned tiles_per_warp) {
  __shared__ Word warp_sums[kWarps];
  const int lane = lane_index(), warp = warp_index();
  const auto index = static_cast<int>(blockIdx.x / blocks_per_range);
  const unsigned range_begin = tiles.first_of(index);
  const unsigned range_end = range_begin + tiles.count_of(index);
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
    const int length = static_cast<int>(min(tiles.tile, range.end - begin));
    if (length == 0) return;  // an empty range
    if (lane == 0 && begin % kBlock == 0) {
      starts[(begin - range.begin) / kBlock] = capacity - output.capacity;
    }
    output =
        output.after(scatter_tile<Grad>(args, staging, t, count, threshold, begin, length, output));
  }
}

}  // namespace dct::cuda
