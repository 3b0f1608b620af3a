#pragma once

// The second kernel of mask_pack: scatters staged entries to their final offsets in the payload.
// All counts are known, because the first kernel has finished.

#include "mask_pack_tile.cuh"

namespace dct::cuda {

// Scatters one tile's entries to the payload. By one warp.
template <typename Grad>
struct TilePlacer {
  const MaskPackArgs& args;
  const Staging& staging;
  Segments segments;
  Range tile;
  Entries payload;  // from the tile's first entry

  // Lane w < kWarps passes the count of warp w, whose slot is number `slot` + w.
  __device__ void run(WarpCount count, int64_t slot) const {
    const uint32_t end = warp_inclusive_sum(uint32_t{count.kept}), first = end - count.kept;
    place_staged(first, count.staged, slot);
    const int done = lane_index() * staging.warp_tile + count.vectors * kWarpVector;
    const int tile_end =
        min(static_cast<int>(tile.end - tile.begin), (lane_index() + 1) * staging.warp_tile);
    unsigned unstaged = __ballot_sync(kFullWarp, lane_index() < kWarps && done < tile_end);
    for (; unstaged != 0; unstaged &= unstaged - 1) {
      const int w = __ffs(static_cast<int>(unstaged)) - 1;
      place_unstaged(__shfl_sync(kFullWarp, done, w), __shfl_sync(kFullWarp, tile_end, w),
                     __shfl_sync(kFullWarp, first + count.staged, w),
                     __shfl_sync(kFullWarp, end, w));
    }
  }

  // Copies the entries of a tile's slots to the payload, those of several slots at a time.
  __device__ void place_staged(uint32_t first_entry, uint32_t staged, int64_t slot) const {
    constexpr int kInFlight = 4;
    for (int first = 0; first < kWarps; first += kInFlight) {
      uint32_t at[kInFlight], count[kInFlight], most = 0;
#pragma unroll
      for (int a = 0; a < kInFlight; ++a) {
        at[a] = __shfl_sync(kFullWarp, first_entry, first + a);
        count[a] = __shfl_sync(kFullWarp, staged, first + a);
        most = max(most, count[a]);
      }
      for (uint32_t i = lane_index(); i < most; i += kWarpSize) {
        uint32_t position[kInFlight], bits[kInFlight];
#pragma unroll
        for (int a = 0; a < kInFlight; ++a) {
          if (i >= count[a]) continue;
          const Entries entries = staging.slot(slot + first + a, args.value_dtype);
          position[a] = entries.positions[i];
          bits[a] = load_value(entries.values, i, args.value_dtype);
        }
#pragma unroll
        for (int a = 0; a < kInFlight; ++a) {
          if (i >= count[a]) continue;
          const int64_t element = tile.begin - tile.begin % kBlock + position[a];
          if (at[a] + i < payload.room) {
            payload.put(at[a] + i, position[a], bits[a]);
          } else if (is_finite(payload_value(bits[a], args.value_dtype))) {
            // Does not fit: back into the residual, from which no non-finite sum was taken.
            float& residual = args.residual[element];
            residual = restore(residual, bits[a], args.value_dtype);
          }
          if (!segments.one()) add_to_seen(args, segment_of(args, segments, element), 1);
        }
      }
    }
  }

  // Recomputes and compacts elements that the first kernel only counted, from its unchanged inputs,
  // so it selects the same ones. Writes entries [entry, last) at most, whatever the segments'
  // offsets are: the entries after those belong to other warps.
  __device__ void place_unstaged(int first, int end, uint32_t entry, uint32_t last) const {
    const auto visit = [&](int64_t element, float sum, bool owned, bool keeps) {
      const unsigned lanes = __ballot_sync(kFullWarp, keeps);
      const uint32_t at = entry + __popc(lanes & ((1u << lane_index()) - 1));
      entry += __popc(lanes);
      if (!(kHasGrad<Grad> ? owned : keeps)) return;
      float& residual = args.residual[element];
      float remainder = sum;
      if (keeps && at < min(last, payload.room)) {
        const Split split_sum = split(sum, args.value_dtype);
        payload.put(at, element, split_sum.bits);
        remainder = split_sum.remainder;
      }
      residual = is_finite(sum) ? remainder : finite_or_zero(residual);
      if (keeps && !segments.one()) add_to_seen(args, segment_of(args, segments, element), 1);
    };
    for_each_element<Grad>(args, segments, tile.begin, first, end, visit);
  }
};

// Prefix and aggregate of one block's tiles, within a range.
struct BlockPrefix {
  Word exclusive;       // entries kept by the tiles before the block's
  uint32_t aggregate;   // entries kept by the block's tiles
  uint32_t non_finite;  // whether any of these entries is not finite
};

// By one block, which has tiles [first, last). Reads 4 bytes for each tile up to its last, from L2.
// The last block of a range reads all of them, so what it writes into the header is exact.
__device__ inline BlockPrefix block_prefix(const uint32_t* totals, unsigned first, unsigned last,
                                           BlockPrefix (&warp_prefixes)[kWarps]) {
  BlockPrefix sum = {};
#pragma unroll 8
  for (unsigned t = thread_index(); t < last; t += kThreads) {
    const uint32_t kept = totals[t] & 0xffff;
    sum.exclusive += t < first ? kept : 0;
    sum.aggregate += t < first ? 0 : kept;
    sum.non_finite |= totals[t] >> 31;
  }
  sum = {warp_sum(sum.exclusive), warp_sum(sum.aggregate),
         __any_sync(kFullWarp, sum.non_finite) != 0};
  if (lane_index() == 0) warp_prefixes[warp_index()] = sum;
  __syncthreads();
  sum = {};
  for (const BlockPrefix& warp : warp_prefixes) {
    sum.exclusive += warp.exclusive;
    sum.aggregate += warp.aggregate;
    sum.non_finite |= warp.non_finite;
  }
  return sum;
}

// A block scatters consecutive tiles of a range, one tile per warp at a time.
template <typename Grad>
__global__ void __launch_bounds__(kThreads, 2)  // at most 128 registers
    mask_pack_place_kernel(MaskPackArgs args, RangeTiles tiles, PayloadLayout layout,
                           Staging staging, unsigned parts, unsigned per_part) {
  struct Shared {
    BlockPrefix warp_prefixes[kWarps];
    Segments segments;  // of the block's tiles
  };
  __shared__ Shared shared;
  const int lane = lane_index(), warp = warp_index();
  const unsigned index = blockIdx.x / parts, first = blockIdx.x % parts * per_part;
  const unsigned tiles_in_range = tiles.count_of(index);
  const unsigned last = min(first + per_part, tiles_in_range);
  if (first >= last) return;
  const Range range = range_bounds(args.numel, args.ranges, index);
  const auto begin_of = [&](unsigned t) { return min(range.begin + t * tiles.tile, range.end); };
  uint8_t* payload = args.payload + index * layout.nbytes;
  auto* starts = reinterpret_cast<uint32_t*>(payload + layout.starts);
  const int64_t first_tile = tiles.first_of(index);
  const uint32_t* totals = staging.totals + first_tile;
  const WarpCount* counts = staging.counts + first_tile * kWarps + lane;

  // Prefetched: the counts of this warp's tile, and the totals of all warps' tiles.
  const auto has = [&](unsigned t) { return t < last && lane < kWarps; };
  WarpCount count = has(first + warp) ? counts[int64_t{first + warp} * kWarps] : WarpCount{};
  uint32_t total = has(first + lane) ? totals[first + lane] & 0xffff : 0;
  if (warp == 0) {
    const Segments found = find_segments(args, all_segments(args), begin_of(first), begin_of(last));
    if (lane == 0) shared.segments = found;
  }
  const BlockPrefix prefix = block_prefix(totals, first, last, shared.warp_prefixes);
  if (last == tiles_in_range && warp == kWarps - 1) {
    bool damage = false;
    for (int64_t i = lane; i < args.num_status; i += kWarpSize) damage |= args.status[i] != 0;
    const PayloadHeader header =
        payload_header(range.end - range.begin, args.capacity, args.value_dtype,
                       prefix.exclusive + prefix.aggregate, prefix.non_finite != 0,
                       __any_sync(kFullWarp, damage) != 0);
    if (lane == 0) {
      *reinterpret_cast<PayloadHeader*>(payload) = header;
      starts[num_blocks(range.end - range.begin)] = header.count;
    }
  }
  const Segments segments = shared.segments;
  if (segments.count == 1 && thread_index() == 0) {
    add_to_seen(args, segments.first, prefix.aggregate);
  }

  const auto capacity = static_cast<uint32_t>(args.capacity);
  uint32_t place = static_cast<uint32_t>(min(prefix.exclusive, Word{capacity}));
  for (unsigned chunk = first; chunk < last; chunk += kWarps) {
    const unsigned t = chunk + warp;
    const WarpCount tile_count = count;
    const uint32_t kept = __shfl_sync(kFullWarp, total, warp);
    const uint32_t before = __reduce_add_sync(kFullWarp, lane < warp ? total : 0);
    const uint32_t kept_in_chunk = __reduce_add_sync(kFullWarp, total);
    const unsigned next = t + kWarps, next_of_lane = chunk + kWarps + lane;
    count = has(next) ? counts[int64_t{next} * kWarps] : WarpCount{};
    total = has(next_of_lane) ? totals[next_of_lane] & 0xffff : 0;
    const Range tile = {begin_of(t), begin_of(t + 1)};
    if (t < last && tile.begin < tile.end) {  // the tile of an empty range is empty
      const uint32_t at = place + min(before, capacity - place);
      if (lane == 0 && tile.begin % kBlock == 0) starts[(tile.begin - range.begin) / kBlock] = at;
      const Segments tile_segments = find_segments(args, segments, tile.begin, tile.end);
      if (!segments.one() && tile_segments.one() && lane == 0) {
        add_to_seen(args, tile_segments.first, kept);
      }
      const Entries room = {reinterpret_cast<uint16_t*>(payload + layout.positions) + at,
                            payload + layout.values + int64_t{at} * itemsize(args.value_dtype),
                            capacity - at, args.value_dtype};
      const TilePlacer<Grad> placer = {args, staging, tile_segments, tile, room};
      placer.run(tile_count, (first_tile + t) * kWarps);
    }
    place += min(kept_in_chunk, capacity - place);
  }
}

}  // namespace dct::cuda
