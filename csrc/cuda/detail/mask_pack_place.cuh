#pragma once

// The second kernel of mask_pack: entries to their place in the payload. The first is complete, so
// that all counts are there.

#include "mask_pack_tile.cuh"

namespace dct::cuda {

constexpr int kPlaceMinBlocks = 2;  // a multiprocessor: at most 128 registers a thread

// A block places neighbouring tiles of a range, a warp one at a time.
template <typename Grad>
struct TilePlacer {
  const MaskPackArgs& args;
  const PayloadLayout& layout;
  const Staging& staging;
  Range range;
  unsigned range_tile, tile, count;  // the range's first tile, the block's, and how many it has
  uint8_t* payload;

  struct Sums {
    Word before, own;     // kept by the tiles of the range before the block's, and by these
    uint32_t non_finite;  // whether one of them is not
  };
  struct Shared {
    Sums of_warp[kWarps];
  };

  __device__ void run(bool last, Shared& shared) {
    const int lane = lane_index(), warp = warp_index();
    const auto count_of = [&](unsigned index) {
      const bool there = index < count && lane < kWarps;
      return there ? staging.counts[int64_t{tile + index} * kWarps + lane] : WarpCount{};
    };
    const auto total_of = [&](unsigned index) {
      return index < count && lane < kWarps ? staging.totals[tile + index] & 0xffff : 0;
    };
    WarpCount own = count_of(warp);
    uint32_t total = total_of(lane);
    const Sums sums = sum_totals(shared);
    if (last && warp == kWarps - 1) write_header(sums);
    if (begin_of(0) == begin_of(count)) return;  // an empty range: no more than a header
    const Segments span = find_segments(args, all_segments(args), begin_of(0), begin_of(count));
    if (span.count == 1 && thread_index() == 0) {
      add_to_segment(args, staging, span.first, sums.own, count);
    }
    const auto capacity = static_cast<Word>(args.capacity);
    auto room = static_cast<uint32_t>(capacity - min(sums.before, capacity));
    for (unsigned chunk = 0; chunk < count; chunk += kWarps) {
      const uint32_t before = __reduce_add_sync(kFullWarp, lane < warp ? total : 0);
      const uint32_t of_chunk = __reduce_add_sync(kFullWarp, total);
      const WarpCount mine = own;
      own = count_of(chunk + kWarps + warp);  // the next ones are on their way
      total = total_of(chunk + kWarps + lane);
      if (chunk + warp < count) {
        place_tile(chunk + warp, room - min(room, before), mine, span);
      }
      room -= min(room, of_chunk);
    }
  }

  __device__ int64_t begin_of(unsigned index) const {
    const int64_t tiles = tile - range_tile + index;
    return min(range.end, range.begin + (tiles * kWarps << staging.warp_tile_bits));
  }

  // By the block: 4 bytes for each tile before its last, from the cache. The range's last block
  // sees them all, so that what it writes into the header is exact.
  __device__ Sums sum_totals(Shared& shared) const {
    Sums sum = {};
#pragma unroll 8
    for (unsigned t = range_tile + thread_index(); t < tile + count; t += kThreads) {
      const uint32_t total = staging.totals[t];
      (t < tile ? sum.before : sum.own) += total & 0xffff;
      sum.non_finite |= total >> 31;
    }
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      sum.before += __shfl_xor_sync(kFullWarp, sum.before, distance);
      sum.own += __shfl_xor_sync(kFullWarp, sum.own, distance);
    }
    sum.non_finite = __any_sync(kFullWarp, sum.non_finite) != 0;
    if (lane_index() == 0) shared.of_warp[warp_index()] = sum;
    __syncthreads();
    sum = {};
    for (const Sums& of_warp : shared.of_warp) {
      sum.before += of_warp.before;
      sum.own += of_warp.own;
      sum.non_finite |= of_warp.non_finite;
    }
    return sum;
  }

  __device__ void write_header(const Sums& sums) const {
    bool damage = false;
    for (int64_t i = lane_index(); i < args.num_status; i += kWarpSize) {
      damage |= args.status[i] != 0;
    }
    damage = __any_sync(kFullWarp, damage) != 0;
    if (lane_index() != 0) return;
    const Word total = sums.before + sums.own, capacity = args.capacity;
    PayloadHeader header = {};
    header.magic = kPayloadMagic;
    header.version = kPayloadVersion;
    header.value_dtype = static_cast<uint8_t>(args.value_dtype);
    header.flags = (total > capacity ? kFlagOverflow : 0) |
                   (sums.non_finite != 0 ? kFlagNonFinite : 0) | (damage ? kFlagDamage : 0);
    header.numel = static_cast<uint64_t>(range.end - range.begin);
    header.capacity = static_cast<uint32_t>(capacity);
    header.count = static_cast<uint32_t>(min(total, capacity));
    *reinterpret_cast<PayloadHeader*>(payload) = header;
    // An empty range has no other start: its tile is in no payload block.
    starts()[num_blocks(range.end - range.begin)] = header.count;
  }

  // By one warp; `room`: entries of the payload that are free for the tile and those behind it.
  // Lanes below kWarps have the counts of the tile's warps.
  __device__ void place_tile(unsigned index, uint32_t room, WarpCount mine,
                             const Segments& span) const {
    const int64_t begin = begin_of(index);
    const auto length = static_cast<int>(begin_of(index + 1) - begin);
    const uint32_t place = static_cast<uint32_t>(args.capacity) - room;
    if (lane_index() == 0 && begin % kBlock == 0) {
      starts()[(begin - range.begin) / kBlock] = place;
    }
    const Segments segments = find_segments(args, span, begin, begin + length);
    const uint32_t up_to = warp_inclusive_sum(uint32_t{mine.kept});
    place_staged(begin, int64_t{tile + index} * kWarps, up_to - mine.kept, mine.staged, place,
                 segments);
    const int done = lane_index() * staging.warp_tile() + mine.rows * kRow;
    const int end = min(length, (lane_index() + 1) * staging.warp_tile());
    unsigned deferred = __ballot_sync(kFullWarp, lane_index() < kWarps && done < end);
    for (; deferred != 0; deferred &= deferred - 1) {
      const int w = __ffs(static_cast<int>(deferred)) - 1, first = w * staging.warp_tile();
      redo(begin + first, __shfl_sync(kFullWarp, end, w) - first,
           __shfl_sync(kFullWarp, uint32_t{mine.rows}, w),
           __shfl_sync(kFullWarp, up_to - mine.kept + mine.staged, w),
           min(room, __shfl_sync(kFullWarp, up_to, w)), place, segments);
    }
    if (span.one()) return;
    const uint32_t kept = __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
    __syncwarp();  // a segment's entries are counted before the tile is
    for (int s = lane_index(); s < segments.count; s += kWarpSize) {
      const int segment = segments.first + s;
      if (segment_begin(args, segment) >= segment_begin(args, segment + 1)) continue;
      add_to_segment(args, staging, segment, segments.one() ? kept : 0, 1);
    }
  }

  // The staged entries of a tile, those of several slots side by side. Lane w knows how many there
  // are in slot w, and how many of the tile are kept before them.
  __device__ void place_staged(int64_t begin, int64_t slot, uint32_t before, uint32_t staged,
                               uint32_t place, const Segments& segments) const {
    constexpr int kAhead = 4;
    for (int first = 0; first < kWarps; first += kAhead) {
      uint32_t at[kAhead], count[kAhead], most = 0;
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        at[a] = __shfl_sync(kFullWarp, before, first + a);
        count[a] = __shfl_sync(kFullWarp, staged, first + a);
        most = max(most, count[a]);
      }
      for (uint32_t i = lane_index(); i < most; i += kWarpSize) {
        uint32_t position[kAhead], bits[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (i >= count[a]) continue;
          const uint8_t* entries = staging.slot(slot + first + a, args.value_dtype);
          position[a] = reinterpret_cast<const uint16_t*>(entries)[i];
          bits[a] = load_value(entries + 2 * staging.room, i, args.value_dtype);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (i >= count[a]) continue;
          const int64_t element = begin - begin % kBlock + position[a];
          if (at[a] + i < static_cast<uint32_t>(args.capacity) - place) {
            put(place + at[a] + i, position[a], bits[a]);
          } else if (is_finite(payload_value(bits[a], args.value_dtype))) {
            float& left = args.residual[element];  // of what is not finite nothing was taken
            left = restore(left, bits[a], args.value_dtype);
          }
          count_entry(segments, element);
        }
      }
    }
  }

  // What the first kernel only counted. Gradient and residual are as they were, so the same is
  // kept. `room`: entries of the tile that may be written. No more than were counted, whatever the
  // segments' offsets are: behind them are others'.
  __device__ void redo(int64_t warp_tile, int length, int row, uint32_t entry, uint32_t room,
                       uint32_t place, const Segments& segments) const {
    const auto visit = [&](int offset, float sum, bool owned, bool keeps) {
      const unsigned lanes = __ballot_sync(kFullWarp, keeps);
      const uint32_t at = entry + __popc(lanes & ((1u << lane_index()) - 1));
      entry += __popc(lanes);
      if (!(kHasGrad<Grad> ? owned : keeps)) return;
      float& residual = args.residual[warp_tile + offset];
      float left = sum;
      if (keeps && at < room) {
        const Taken taken = take(sum, args.value_dtype);
        put(place + at, (warp_tile + offset) % kBlock, taken.bits);
        left = taken.left;
      }
      residual = is_finite(sum) ? left : finite_or_zero(residual);
      if (keeps) count_entry(segments, warp_tile + offset);
    };
    for_each_element<Grad>(args, segments, warp_tile, length, row, visit);
  }

  __device__ void put(uint32_t at, uint32_t position, uint32_t bits) const {
    reinterpret_cast<uint16_t*>(payload + layout.positions)[at] = static_cast<uint16_t>(position);
    store_value(payload + layout.values, at, bits, args.value_dtype);
  }

  // Where segments share a tile, each of its entries is counted by itself.
  __device__ void count_entry(const Segments& segments, int64_t element) const {
    if (segments.one()) return;
    add_to_segment(args, staging, segment_of(args, segments, element), 1, 0);
  }

  __device__ uint32_t* starts() const {
    return reinterpret_cast<uint32_t*>(payload + layout.starts);
  }
};

template <typename Grad>
__global__ void __launch_bounds__(kThreads, kPlaceMinBlocks)
    mask_pack_place_kernel(MaskPackArgs args, RangeTiles tiles, PayloadLayout layout,
                           Staging staging, unsigned parts, unsigned per_part) {
  using Placer = TilePlacer<Grad>;
  DCT_SHARED(typename Placer::Shared, shared);
  const unsigned range = blockIdx.x / parts, first = blockIdx.x % parts * per_part;
  const unsigned of_range = tiles.count_of(range), last = min(first + per_part, of_range);
  if (first >= last) return;
  const unsigned range_tile = tiles.first_of(range);
  Placer{args,         layout,
         staging,      range_bounds(args.numel, args.ranges, range),
         range_tile,   range_tile + first,
         last - first, args.payload + range * layout.nbytes}
      .run(last == of_range, shared);
}

}  // namespace dct::cuda
