#pragma once

// The second kernel of mask_pack: entries to their place in the payload. The first is complete, so
// that all counts are there.

#include "mask_pack_tile.cuh"

namespace dct::cuda {

constexpr int kPlaceMinBlocks = 2;  // a multiprocessor: at most 128 registers a thread

// A warp places the entries of a tile.
template <typename Grad>
struct TilePlacer {
  const MaskPackArgs& args;
  const Staging& staging;
  ValueFormat format;
  Segments segments;
  Range tile;
  Sink payload;          // from the tile's first entry on
  uint16_t* sub_starts;  // of its block, in e3m0
  uint32_t in_block;     // entries of the block before it
  bool last;             // of its range

  // `mine`: of lane w < kWarps, what warp w has counted, whose slot is number `slot` + w.
  __device__ void run(WarpCount mine, int64_t slot) const {
    const uint32_t up_to = warp_inclusive_sum(uint32_t{mine.kept}), before = up_to - mine.kept;
    if (format.is_e3m0()) write_sub_starts(before);
    const uint32_t behind = move_staged(before, mine.staged, slot);
    const int done = lane_index() * staging.warp_tile() + mine.rows * kRow;
    const int end =
        min(static_cast<int>(tile.end - tile.begin), (lane_index() + 1) * staging.warp_tile());
    unsigned left_out = __ballot_sync(kFullWarp, lane_index() < kWarps && done < end);
    for (; left_out != 0; left_out &= left_out - 1) {
      const int w = __ffs(static_cast<int>(left_out)) - 1;
      redo(__shfl_sync(kFullWarp, done, w), __shfl_sync(kFullWarp, end, w),
           __shfl_sync(kFullWarp, behind, w), __shfl_sync(kFullWarp, up_to, w));
    }
  }

  // Those of the block's sub-blocks that begin in the tile, and of the last tile all behind it:
  // they are empty. `before`: of lane w, entries of the tile before those of warp w.
  __device__ void write_sub_starts(uint32_t before) const {
    const int q = lane_index() + 1;
    const int offset = q * int{kSubBlock} - static_cast<int>(tile.begin % kBlock);
    const int of_warp = min(max(offset, 0) >> staging.warp_tile_bits, kWarps);
    const uint32_t entries = __shfl_sync(kFullWarp, before, of_warp);
    if (q >= kSubBlocks || offset < 0 || (of_warp == kWarps && !last)) return;
    sub_starts[q - 1] = static_cast<uint16_t>(in_block + min(entries, payload.room));
  }

  // The entries of a tile's slots, those of several side by side. Returns, of lane w, where those
  // begin that warp w has not staged.
  __device__ uint32_t move_staged(uint32_t before, uint32_t staged, int64_t slot) const {
    constexpr int kAhead = 4;
    const unsigned below = (1u << lane_index()) - 1;
    uint32_t behind = 0;
    for (int first = 0; first < kWarps; first += kAhead) {
      uint32_t at[kAhead], count[kAhead], most = 0;
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        at[a] = __shfl_sync(kFullWarp, before, first + a);
        count[a] = __shfl_sync(kFullWarp, staged, first + a);
        most = max(most, count[a]);
      }
      for (uint32_t from = 0; from < most; from += kWarpSize) {
        const uint32_t i = from + lane_index();
        uint32_t position[kAhead], bits[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (i >= count[a]) continue;
          const Sink entries = staging.slot(slot + first + a, args.value_dtype);
          position[a] = entries.positions[i];
          bits[a] = load_value(entries.values, i, args.value_dtype);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          const bool sends = i < count[a] && !format.sends_nothing(bits[a]);
          const unsigned lanes = __ballot_sync(kFullWarp, sends);
          const uint32_t entry = at[a] + __popc(lanes & below);
          at[a] += __popc(lanes);
          if (i >= count[a]) continue;
          const int64_t element = tile.begin - tile.begin % kBlock + position[a];
          if (sends && entry < payload.room) {
            payload.put(entry, position[a], bits[a]);
          } else if (sends && is_finite(format.value(bits[a]))) {
            float& left = args.residual[element];  // of what is not finite nothing was taken
            left = format.restore(left, bits[a]);
          }
          count_entry(element);
        }
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (lane_index() == first + a) behind = at[a];
      }
    }
    return behind;
  }

  // What the first kernel has only counted: gradient and residual are as they were, so the same
  // passes. Entries from number `entry` to `last_entry`, whatever the segments' offsets are: behind
  // them are others'.
  __device__ void redo(int first, int end, uint32_t entry, uint32_t last_entry) const {
    const auto visit = [&](int64_t element, float sum, bool owned, bool passes) {
      const bool sends = passes && format.sends(sum);
      const unsigned lanes = __ballot_sync(kFullWarp, sends);
      const uint32_t at = entry + __popc(lanes & ((1u << lane_index()) - 1));
      entry += __popc(lanes);
      if (!(kHasGrad<Grad> ? owned : passes)) return;
      float& residual = args.residual[element];
      float left = sum;
      if (sends && at < min(last_entry, payload.room)) {
        const Taken taken = format.take(sum);
        payload.put(at, element, taken.bits);
        left = taken.left;
      }
      residual = is_finite(sum) ? left : finite_or_zero(residual);
      if (passes) count_entry(element);
    };
    for_each_element<Grad>(args, segments, tile.begin, first, end, visit);
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

// Kept by the tiles of a range before a block's, and by these; and whether one of them is not
// finite.
struct Sums {
  Word before, own;
  uint32_t non_finite;
};

// By one block, that has tiles [first, last): 4 bytes for each up to its last, from the cache. The
// range's last block sees them all, so that what it writes into the header is exact.
__device__ inline Sums sum_totals(const uint32_t* totals, unsigned first, unsigned last,
                                  Sums (&of_warps)[kWarps]) {
  Sums sum = {};
#pragma unroll 8
  for (unsigned t = thread_index(); t < last; t += kThreads) {
    const uint32_t total = totals[t];
    (t < first ? sum.before : sum.own) += total & 0xffff;
    sum.non_finite |= total >> 31;
  }
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    sum.before += __shfl_xor_sync(kFullWarp, sum.before, distance);
    sum.own += __shfl_xor_sync(kFullWarp, sum.own, distance);
  }
  sum.non_finite = __any_sync(kFullWarp, sum.non_finite) != 0;
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

// By one warp.
__device__ inline bool any_damage(const MaskPackArgs& args) {
  bool damage = false;
  for (int64_t i = lane_index(); i < args.num_status; i += kWarpSize) damage |= args.status[i] != 0;
  return __any_sync(kFullWarp, damage) != 0;
}

// A block places neighbouring tiles of a range, a warp one at a time.
template <typename Grad>
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
  auto* sub_starts = reinterpret_cast<uint16_t*>(payload + layout.sub_starts);
  const ValueFormat format = format_of(args, static_cast<int>(index));
  const int64_t before_range = tiles.first_of(index);
  const uint32_t* totals = staging.totals + before_range;
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
  const Sums sums = sum_totals(totals, first, last, shared.of_warps);
  if (last == of_range && warp == kWarps - 1) {
    const bool damage = any_damage(args);
    const Word kept = sums.before + sums.own;
    const int64_t numel = range.end - range.begin;
    const PayloadHeader header = format.is_e3m0()
                                     ? e3m0_header(numel, args.capacity, E3M0Scale(format.scale),
                                                   kept, sums.non_finite != 0, damage)
                                     : payload_header(numel, args.capacity, args.value_dtype, kept,
                                                      sums.non_finite != 0, damage);
    if (lane == 0) {
      *reinterpret_cast<PayloadHeader*>(payload) = header;
      starts[num_blocks(range.end - range.begin)] = header.count;
    }
  }
  if (range.begin == range.end) return;  // one tile, of no payload block
  const Segments segments = shared.segments;

  auto* positions = reinterpret_cast<uint16_t*>(payload + layout.positions);
  uint8_t* values = format.is_e3m0() ? nullptr : payload + layout.values;
  const int of_block = static_cast<int>(kBlock / tiles.tile);  // tiles; all in one chunk
  const auto capacity = static_cast<uint32_t>(args.capacity);
  uint32_t place = static_cast<uint32_t>(min(sums.before, Word{capacity}));
  uint32_t passed = 0, placed = 0;  // of this lane's counts; tiles
  for (unsigned chunk = first; chunk < last; chunk += kWarps) {
    const unsigned t = chunk + warp;
    const WarpCount mine = count;
    const auto before_tile = [&](int w) {
      const uint32_t before = __reduce_add_sync(kFullWarp, lane < w ? total : 0);
      return place + min(before, capacity - place);
    };
    const uint32_t at = before_tile(warp);
    const uint32_t block_at = format.is_e3m0() ? before_tile(warp / of_block * of_block) : at;
    const uint32_t of_chunk = __reduce_add_sync(kFullWarp, total);
    count = count_of(t + kWarps);
    total = total_of(chunk + kWarps + lane);
    if (t < last) {
      const Range tile = {begin_of(t), begin_of(t + 1)};
      const int64_t block = (tile.begin - range.begin) / kBlock;
      if (lane == 0 && tile.begin % kBlock == 0) starts[block] = at;
      const Segments own = find_segments(args, segments, tile.begin, tile.end);
      const Sink sink = {
          positions + at,
          values == nullptr ? nullptr : values + int64_t{at} * itemsize(format.dtype),
          capacity - at, format.dtype};
      const TilePlacer<Grad> placer = {args,
                                       staging,
                                       format,
                                       own,
                                       tile,
                                       sink,
                                       sub_starts + (kSubBlocks - 1) * block,
                                       at - block_at,
                                       t + 1 == of_range};
      placer.run(mine, (before_range + t) * kWarps);
      if (segments.one()) {
        passed += mine.passed;
        ++placed;
      } else {
        placer.count_tile(__reduce_add_sync(kFullWarp, uint32_t{mine.passed}));
      }
    }
    place += min(of_chunk, capacity - place);
  }
  passed = __reduce_add_sync(kFullWarp, passed);
  if (lane == 0 && placed > 0 && segments.count == 1) {
    add_to_segment(args, staging, segments.first, passed, placed);
  }
}

}  // namespace dct::cuda
