#pragma once

// The second kernel of mask_pack: entries to their place in the payload. The first is complete, so
// that all counts are there.

#include "mask_pack_sums.cuh"

namespace dct::cuda {

constexpr int kPlaceMinBlocks = 2;  // a multiprocessor: at most 128 registers a thread

// A warp places the entries of a tile.
template <typename Grad, typename Format>
struct TilePlacer {
  const MaskPackArgs& args;
  const Staging& staging;
  const Format& format;
  Segments segments;
  Range tile;
  Sink payload;  // from the tile's first entry on

  // Of lane w < kWarps: `mine`, what warp w has counted, whose slot is number `slot` + w; `before`,
  // the tile's entries before those.
  __device__ void run(WarpCount mine, uint32_t before, int64_t slot) const {
    const uint32_t behind = move_staged(before, mine.staged, slot);
    const int done = lane_index() * staging.warp_tile() + mine.rows * kRow;
    const int end =
        min(static_cast<int>(tile.end - tile.begin), (lane_index() + 1) * staging.warp_tile());
    unsigned left_out = __ballot_sync(kFullWarp, lane_index() < kWarps && done < end);
    for (; left_out != 0; left_out &= left_out - 1) {
      const int w = __ffs(static_cast<int>(left_out)) - 1;
      redo(__shfl_sync(kFullWarp, done, w), __shfl_sync(kFullWarp, end, w),
           __shfl_sync(kFullWarp, behind, w), __shfl_sync(kFullWarp, before + mine.kept, w));
    }
  }

  // In e3m0: where those of the block's sub-blocks begin that begin in the tile, and of the range's
  // last tile all behind it, which are empty. `in_block`: entries of the block before the tile's.
  __device__ void write_sub_starts(uint16_t* sub_starts, uint32_t in_block, uint32_t before,
                                   bool last) const {
    const int q = lane_index() + 1;
    const int offset = q * int{kSubBlock} - static_cast<int>(tile.begin % kBlock);
    const int warp = min(max(offset, 0) >> staging.warp_tile_bits, kWarps);
    const uint32_t entries = __shfl_sync(kFullWarp, before, warp);
    if (q >= kSubBlocks || offset < 0 || (warp == kWarps && !last)) return;
    sub_starts[q - 1] = static_cast<uint16_t>(in_block + min(entries, payload.room));
  }

  // The entries of a tile's slots, those of several side by side. Returns, of lane w, where those
  // go that warp w has not staged.
  __device__ uint32_t move_staged(uint32_t before, uint32_t staged, int64_t slot) const {
    constexpr int kAhead = 4;
    const unsigned below = (1u << lane_index()) - 1;
    uint32_t behind = before + staged;
    for (int first = 0; first < kWarps; first += kAhead) {
      uint32_t at[kAhead], count[kAhead], most = 0;
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        at[a] = __shfl_sync(kFullWarp, before, first + a);
        count[a] = __shfl_sync(kFullWarp, staged, first + a);
        most = max(most, count[a]);
      }
      if (Format::kE3M0) most = (most + kWarpSize - 1) / kWarpSize * kWarpSize;  // all lanes vote
      for (uint32_t i = lane_index(); i < most; i += kWarpSize) {
        uint32_t position[kAhead], bits[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (i >= count[a]) continue;
          const Sink entries = staging.slot(slot + first + a, format.dtype);
          position[a] = entries.positions[i];
          bits[a] = load_value(entries.values, i, format.dtype);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          const bool sent = i < count[a] && format.is_sent(bits[a]);
          const unsigned unsent =
              Format::kE3M0 ? __ballot_sync(kFullWarp, i < count[a] && !sent) : 0;
          const uint32_t entry = at[a] + i - __popc(unsent & below);
          at[a] -= __popc(unsent);
          if (i >= count[a]) continue;
          const int64_t element = tile.begin - tile.begin % kBlock + position[a];
          if (sent && entry < payload.room) {
            put(entry, position[a], bits[a]);
          } else if (sent && is_finite(format.value(bits[a]))) {
            float& left = args.residual[element];  // of what is not finite nothing was taken
            left = __fadd_rn(left, format.value(bits[a]));
          }
          count_entry(element);
        }
      }
#pragma unroll
      for (int a = 0; Format::kE3M0 && a < kAhead; ++a) {
        if (lane_index() == first + a) behind = at[a] + count[a];
      }
    }
    return behind;
  }

  // What the first kernel has only counted: gradient and residual are as they were, so the same
  // passes. Entries from number `entry` to `last_entry`, whatever the segments' offsets are: behind
  // them are others'.
  __device__ void redo(int first, int end, uint32_t entry, uint32_t last_entry) const {
    const auto visit = [&](int64_t element, float sum, bool owned, bool passing) {
      const bool sends = passing && format.sends(sum);
      const unsigned lanes = __ballot_sync(kFullWarp, sends);
      const uint32_t at = entry + __popc(lanes & ((1u << lane_index()) - 1));
      entry += __popc(lanes);
      if (!(kHasGrad<Grad> ? owned : passing)) return;
      float& residual = args.residual[element];
      float left = sum;
      if (sends && at < min(last_entry, payload.room)) {
        const Taken taken = format.take(sum);
        put(at, element, taken.bits);
        left = taken.left;
      }
      residual = is_finite(sum) ? left : finite_or_zero(residual);
      if (passing) count_entry(element);
    };
    for_each_element<Grad>(args, segments, tile.begin, first, end, visit);
  }

  __device__ void put(uint32_t entry, int64_t element, uint32_t bits) const {
    if constexpr (Format::kE3M0) {
      payload.positions[entry] = static_cast<uint16_t>(element % kSubBlock << 4 | bits);
    } else {
      payload.put(entry, element, bits);
    }
  }

  // Where segments share a tile, each of its entries is counted by itself, and before the tile is.
  __device__ void count_entry(int64_t element) const {
    if (segments.one()) return;
    add_to_segment(args, staging, segment_of(args, segments, element), 1, 0);
  }
  __device__ void count_tile(uint32_t passed) const {
    __syncwarp();
    for (int i = lane_index(); i < segments.count; i += kWarpSize) {
      const int s = segments.first + i;
      if (segment_begin(args, s) >= segment_begin(args, s + 1)) continue;
      add_to_segment(args, staging, s, segments.one() ? passed : 0, 1);
    }
  }
};

// By one warp.
__device__ inline bool any_damage(const MaskPackArgs& args) {
  bool damage = false;
  for (int64_t i = lane_index(); i < args.num_status; i += kWarpSize) damage |= args.status[i] != 0;
  return __any_sync(kFullWarp, damage) != 0;
}

// A block places neighbouring tiles of a range, a warp one at a time.
template <typename Grad, typename Format>
__global__ void __launch_bounds__(kThreads, kPlaceMinBlocks)
    mask_pack_place_kernel(MaskPackArgs args, RangeTiles tiles, Sections layout, Staging staging,
                           unsigned parts, unsigned per_part) {
  struct Shared {
    Sums of_warps[kWarps];
    Segments segments;  // of the block's tiles
  };
  DCT_SHARED(Shared, shared);
  const int lane = lane_index(), warp = warp_index();
  const unsigned index = blockIdx.x / parts, first = blockIdx.x % parts * per_part;
  const unsigned of_range = tiles.count_of(index), last = min(first + per_part, of_range);
  if (first >= last) return;
  const Range range = range_bounds(args.numel, args.ranges, index);
  const auto begin_of = [&](unsigned t) { return min(range.begin + t * tiles.tile, range.end); };
  uint8_t* payload = args.payload + index * layout.nbytes;
  auto* starts = reinterpret_cast<uint32_t*>(payload + layout.starts);
  const Format format(args, static_cast<int>(index));
  const int64_t before_range = tiles.first_of(index);
  const uint32_t* totals = staging.totals + before_range;
  const uint32_t* unsent = staging.unsent + before_range;
  const WarpCount* counts = staging.counts + before_range * kWarps + lane;

  // What is asked for ahead: counts of a warp's tile, and totals of the tiles of all warps.
  const auto count_of = [&](unsigned t) {
    return t < last && lane < kWarps ? counts[int64_t{t} * kWarps] : WarpCount{};
  };
  const auto total_of = [&](unsigned t) {
    return t < last && lane < kWarps ? totals[t] & 0xffff : 0;
  };
  WarpCount count = count_of(first + warp);
  uint32_t total = total_of(first + lane);
  if (warp == 0) {
    const Segments all = all_segments(args);
    const Segments found = find_segments(args, all, begin_of(first), begin_of(last));
    if (lane == 0) shared.segments = found;
  }
  const Sums sums = sum_totals<Format>(totals, unsent, first, last, shared.of_warps);
  if (last == of_range && warp == kWarps - 1) {
    const bool damage = any_damage(args);
    const PayloadHeader header =
        format.header(range.end - range.begin, args.capacity, sums.before + sums.own,
                      sums.non_finite != 0, damage);
    if (lane == 0) {
      *reinterpret_cast<PayloadHeader*>(payload) = header;
      starts[num_blocks(range.end - range.begin)] = header.count;
    }
  }
  if (range.begin == range.end) return;  // one tile, of no payload block
  const Segments segments = shared.segments;
  if (segments.count == 1 && thread_index() == 0) {
    const Word passed = sums.own + (Format::kE3M0 ? sums.unsent : 0);
    add_to_segment(args, staging, segments.first, passed, last - first);
  }

  auto* positions = reinterpret_cast<uint16_t*>(payload + layout.positions);
  uint8_t* values = payload + layout.values;
  const auto capacity = static_cast<uint32_t>(args.capacity);
  uint32_t place = static_cast<uint32_t>(min(sums.before, Word{capacity}));
  for (unsigned chunk = first; chunk < last; chunk += kWarps) {
    const unsigned t = chunk + warp;
    const WarpCount mine = count;
    const auto entries_before = [&](int w) {
      const uint32_t before = __reduce_add_sync(kFullWarp, lane < w ? total : 0);
      return place + min(before, capacity - place);
    };
    const uint32_t at = entries_before(warp);
    uint32_t of_block = at;  // the first entry of the tile's block, whose tiles are of one chunk
    if constexpr (Format::kE3M0) of_block = entries_before(warp & -int(kBlock / tiles.tile));
    const uint32_t kept = __shfl_sync(kFullWarp, total, warp);
    const uint32_t of_chunk = __reduce_add_sync(kFullWarp, total);
    count = count_of(t + kWarps);
    total = total_of(chunk + kWarps + lane);
    if (t < last) {
      const Range tile = {begin_of(t), begin_of(t + 1)};
      const int64_t block = (tile.begin - range.begin) / kBlock;
      if (lane == 0 && tile.begin % kBlock == 0) starts[block] = at;
      const Segments own = find_segments(args, segments, tile.begin, tile.end);
      const Sink sink = {positions + at, values + int64_t{at} * itemsize(args.value_dtype),
                         capacity - at, args.value_dtype};
      const TilePlacer<Grad, Format> placer = {args, staging, format, own, tile, sink};
      const uint32_t before = warp_inclusive_sum(uint32_t{mine.kept}) - mine.kept;
      if constexpr (Format::kE3M0) {
        auto* sub_starts = reinterpret_cast<uint16_t*>(payload + layout.sub_starts);
        placer.write_sub_starts(sub_starts + (kSubBlocks - 1) * block, at - of_block, before,
                                t + 1 == of_range);
      }
      placer.run(mine, before, (before_range + t) * kWarps);
      if (!segments.one()) placer.count_tile(kept + (Format::kE3M0 ? unsent[t] : 0));
    }
    place += min(of_chunk, capacity - place);
  }
}

}  // namespace dct::cuda
