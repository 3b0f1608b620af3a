#pragma once

// The second kernel of mask_pack: entries to their place in the payload. The first is complete, so
// all counts are known.

#include "mask_pack_tile.cuh"

namespace dct::cuda {

// A warp places the entries of a tile.
template <typename Grad>
struct TilePlacer {
  const MaskPackArgs& args;
  const Staging& staging;
  Segments segments;
  Range tile;
  Entries payload;  // from the tile's first entry on

  // In lane w < kWarps `count` is that of warp w, whose slot is number `slot` + w.
  __device__ void run(WarpCount count, int64_t slot) const {
    const uint32_t end = warp_inclusive_sum(uint32_t{count.kept}), first = end - count.kept;
    place_staged(first, count.staged, slot);
    const int done = lane_index() * staging.warp_tile + count.rows * kRow;
    const int tile_end =
        min(static_cast<int>(tile.end - tile.begin), (lane_index() + 1) * staging.warp_tile);
    unsigned left_out = __ballot_sync(kFullWarp, lane_index() < kWarps && done < tile_end);
    for (; left_out != 0; left_out &= left_out - 1) {
      const int w = __ffs(static_cast<int>(left_out)) - 1;
      place_left_out(__shfl_sync(kFullWarp, done, w), __shfl_sync(kFullWarp, tile_end, w),
                     __shfl_sync(kFullWarp, first + count.staged, w),
                     __shfl_sync(kFullWarp, end, w));
    }
  }

  // The entries of a tile's slots, those of several side by side.
  __device__ void place_staged(uint32_t first_entry, uint32_t staged, int64_t slot) const {
    constexpr int kAhead = 4;
    for (int first = 0; first < kWarps; first += kAhead) {
      uint32_t at[kAhead], count[kAhead], most = 0;
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        at[a] = __shfl_sync(kFullWarp, first_entry, first + a);
        count[a] = __shfl_sync(kFullWarp, staged, first + a);
        most = max(most, count[a]);
      }
      for (uint32_t i = lane_index(); i < most; i += kWarpSize) {
        uint32_t position[kAhead], bits[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (i >= count[a]) continue;
          const Entries entries = staging.slot(slot + first + a, args.value_dtype);
          position[a] = entries.positions[i];
          bits[a] = load_value(entries.values, i, args.value_dtype);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (i >= count[a]) continue;
          const int64_t element = tile.begin - tile.begin % kBlock + position[a];
          if (at[a] + i < payload.room) {
            payload.put(at[a] + i, position[a], bits[a]);
          } else if (is_finite(payload_value(bits[a], args.value_dtype))) {
            float& left = args.residual[element];  // from a sum that is not finite none was taken
            left = restore(left, bits[a], args.value_dtype);
          }
          if (!segments.one()) add_to_seen(args, segment_of(args, segments, element), 1);
        }
      }
    }
  }

  // What the first kernel has only counted: gradient and residual are as they were, so the same is
  // kept. Entries number `entry` to `last`, whatever the segments' offsets are: those behind belong
  // to other warps.
  __device__ void place_left_out(int first, int end, uint32_t entry, uint32_t last) const {
    const auto visit = [&](int64_t element, float sum, bool owned, bool keeps) {
      const unsigned lanes = __ballot_sync(kFullWarp, keeps);
      const uint32_t at = entry + __popc(lanes & ((1u << lane_index()) - 1));
      entry += __popc(lanes);
      if (!(kHasGrad<Grad> ? owned : keeps)) return;
      float& residual = args.residual[element];
      float left = sum;
      if (keeps && at < min(last, payload.room)) {
        const Taken taken = take(sum, args.value_dtype);
        payload.put(at, element, taken.bits);
        left = taken.left;
      }
      residual = is_finite(sum) ? left : finite_or_zero(residual);
      if (keeps && !segments.one()) add_to_seen(args, segment_of(args, segments, element), 1);
    };
    for_each_element<Grad>(args, segments, tile.begin, first, end, visit);
  }
};

// Entries kept by the tiles of a range before a block's, and by the block's, and whether one of all
// these is not finite.
struct Sums {
  Word before;
  uint32_t own, non_finite;
};

// By one block, which has tiles [first, last): 4 bytes for each up to its last, from the cache. The
// last block of a range reads all of them, so what it writes into the header is exact.
__device__ inline Sums sum_totals(const uint32_t* totals, unsigned first, unsigned last,
                                  Sums (&of_warps)[kWarps]) {
  Sums sum = {};
#pragma unroll 8
  for (unsigned t = thread_index(); t < last; t += kThreads) {
    const uint32_t kept = totals[t] & 0xffff;
    sum.before += t < first ? kept : 0;
    sum.own += t < first ? 0 : kept;
    sum.non_finite |= totals[t] >> 31;
  }
  sum = {warp_sum(sum.before), warp_sum(sum.own), __any_sync(kFullWarp, sum.non_finite) != 0};
  if (lane_index() == 0) of_warps[warp_index()] = sum;
  __syncthreads();
  sum = {};
  for (const Sums& of_warp : of_warps) {
    sum.before += of_warp.before;
    sum.own += of_warp.own;
    sum.non_finite |= of_warp.non_finite;
  }
  return sum;
}

// A block places neighbouring tiles of a range, a warp one at a time.
template <typename Grad>
__global__ void __launch_bounds__(kThreads, 2)  // at most 128 registers
    mask_pack_place_kernel(MaskPackArgs args, RangeTiles tiles, PayloadLayout layout,
                           Staging staging, unsigned parts, unsigned per_part) {
  struct Shared {
    Sums of_warps[kWarps];
    Segments segments;  // of the block's tiles
  };
  __shared__ Shared shared;
  const int lane = lane_index(), warp = warp_index();
  const unsigned index = blockIdx.x / parts, first = blockIdx.x % parts * per_part;
  const unsigned of_range = tiles.count_of(index), last = min(first + per_part, of_range);
  if (first >= last) return;
  const Range range = range_bounds(args.numel, args.ranges, index);
  const auto begin_of = [&](unsigned t) { return min(range.begin + t * tiles.tile, range.end); };
  uint8_t* payload = args.payload + index * layout.nbytes;
  auto* starts = reinterpret_cast<uint32_t*>(payload + layout.starts);
  const int64_t before_range = tiles.first_of(index);
  const uint32_t* totals = staging.totals + before_range;
  const WarpCount* counts = staging.counts + before_range * kWarps + lane;

  // Loaded ahead: the counts of a warp's tile, and the totals of the tiles of all warps.
  const auto has = [&](unsigned t) { return t < last && lane < kWarps; };
  WarpCount count = has(first + warp) ? counts[int64_t{first + warp} * kWarps] : WarpCount{};
  uint32_t total = has(first + lane) ? totals[first + lane] & 0xffff : 0;
  if (warp == 0) {
    const Segments found = find_segments(args, all_segments(args), begin_of(first), begin_of(last));
    if (lane == 0) shared.segments = found;
  }
  const Sums sums = sum_totals(totals, first, last, shared.of_warps);
  if (last == of_range && warp == kWarps - 1) {
    bool damage = false;
    for (int64_t i = lane; i < args.num_status; i += kWarpSize) damage |= args.status[i] != 0;
    const PayloadHeader header = payload_header(
        range.end - range.begin, args.capacity, args.value_dtype, sums.before + sums.own,
        sums.non_finite != 0, __any_sync(kFullWarp, damage) != 0);
    if (lane == 0) {
      *reinterpret_cast<PayloadHeader*>(payload) = header;
      starts[num_blocks(range.end - range.begin)] = header.count;
    }
  }
  const Segments segments = shared.segments;
  if (segments.count == 1 && thread_index() == 0) add_to_seen(args, segments.first, sums.own);

  const auto capacity = static_cast<uint32_t>(args.capacity);
  uint32_t place = static_cast<uint32_t>(min(sums.before, Word{capacity}));
  for (unsigned chunk = first; chunk < last; chunk += kWarps) {
    const unsigned t = chunk + warp;
    const WarpCount tile_count = count;
    const uint32_t kept = __shfl_sync(kFullWarp, total, warp);
    const uint32_t before = __reduce_add_sync(kFullWarp, lane < warp ? total : 0);
    const uint32_t of_chunk = __reduce_add_sync(kFullWarp, total);
    const unsigned next = t + kWarps, next_of_lane = chunk + kWarps + lane;
    count = has(next) ? counts[int64_t{next} * kWarps] : WarpCount{};
    total = has(next_of_lane) ? totals[next_of_lane] & 0xffff : 0;
    const Range tile = {begin_of(t), begin_of(t + 1)};
    if (t < last && tile.begin < tile.end) {  // an empty range has an empty tile
      const uint32_t at = place + min(before, capacity - place);
      if (lane == 0 && tile.begin % kBlock == 0) starts[(tile.begin - range.begin) / kBlock] = at;
      const Segments of_tile = find_segments(args, segments, tile.begin, tile.end);
      if (!segments.one() && of_tile.one() && lane == 0) add_to_seen(args, of_tile.first, kept);
      const Entries room = {reinterpret_cast<uint16_t*>(payload + layout.positions) + at,
                            payload + layout.values + int64_t{at} * itemsize(args.value_dtype),
                            capacity - at, args.value_dtype};
      const TilePlacer<Grad> placer = {args, staging, of_tile, tile, room};
      placer.run(tile_count, (before_range + t) * kWarps);
    }
    place += min(of_chunk, capacity - place);
  }
}

}  // namespace dct::cuda
