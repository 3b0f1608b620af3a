#pragma once

// The second kernel of mask_pack: entries to their place in the payload, and what was not staged.

#include "mask_pack_staging.cuh"

namespace dct::cuda {

constexpr int kPlaceMinBlocks = 2;  // a multiprocessor: at most 128 registers a thread

// What some tiles hold.
struct Holding {
  Word before, own;  // kept by the tiles of the range before these, and by these
  bool non_finite;   // of any of them
};

// A block places neighbouring tiles of a range, a warp one at a time.
template <typename Grad>
class TilePlacer {
 public:
  struct Shared {
    Holding holding[kWarps];
  };

  // Tiles [first, last) of the range.
  __device__ TilePlacer(const MaskPackArgs& args, const RangeTiles& tiles,
                        const PayloadLayout& layout, const Staging& staging, unsigned range,
                        unsigned first, unsigned last, bool aligned)
      : args_(args),
        layout_(layout),
        staging_(staging),
        payload_(args.payload + range * layout.nbytes),
        tile_(tiles.first_of(range) + first),
        count_(last - first),
        aligned_(aligned) {
    const Range bounds = range_bounds(args.numel, args.ranges, range);
    begin_ = bounds.begin + (int64_t{first} << staging.tile_bits);
    length_ = static_cast<int>(min(bounds.end - begin_, int64_t{count_} << staging.tile_bits));
  }

  __device__ void run(const RangeTiles& tiles, unsigned range, Shared& shared) {
    const Holding holding = sum_totals(tiles.first_of(range), shared);
    // Who has the range's last tile has seen all of its totals.
    const bool ends = tile_ + count_ == tiles.first_of(range) + tiles.count_of(range);
    if (ends && warp_index() == kWarps - 1) {
      write_header(range_bounds(args_.numel, args_.ranges, range), holding);
    }
    const Segments span = find_segments(args_, begin_, begin_ + length_);
    if (span.count == 1 && thread_index() == 0) {
      add_to_segment(args_, staging_.segments, span.first, holding.own, count_, staging_.tile_bits);
    }
    const auto capacity = static_cast<Word>(args_.capacity);
    const auto room = static_cast<uint32_t>(capacity - min(holding.before, capacity));
    const bool one = span.one();
    bool deferred = false;
    for_each_tile(room, [&](const Tile& tile) { deferred |= place(tile, one); });
    if (deferred) for_each_tile(room, [&](const Tile& tile) { redo(tile, one); });
  }

 private:
  // A tile of a warp, and what each lane below kWarps knows of one of its warp tiles.
  struct Tile {
    unsigned number;  // of all tiles
    int64_t begin;
    int length;
    uint32_t room;    // entries of the payload that are free for it and those behind it
    WarpWord word;    // of the lane's warp tile
    uint32_t before;  // kept in the warp tiles before that
    uint32_t kept;    // in the tile
  };

  // Calls function(tile) for each of a warp's tiles.
  template <typename Function>
  __device__ void for_each_tile(uint32_t room, Function function) const {
    const int lane = lane_index(), warp = warp_index();
    const auto word_of = [&](unsigned tile) {
      const bool there = tile < count_ && lane < kWarps;
      return there ? staging_.words[int64_t{tile_ + tile} * kWarps + lane] : 0;
    };
    const auto total_of = [&](unsigned tile) {
      return tile < count_ && lane < kWarps ? staging_.totals[tile_ + tile] & 0xffff : 0;
    };
    uint32_t word = word_of(warp), total = total_of(lane);
    for (unsigned chunk = 0; chunk < count_; chunk += kWarps) {
      const unsigned index = chunk + warp;
      const WarpWord own(word);
      const uint32_t below = __reduce_add_sync(kFullWarp, lane < warp ? total : 0);
      const uint32_t of_chunk = __reduce_add_sync(kFullWarp, total);
      word = word_of(index + kWarps);  // the next ones are on their way
      total = total_of(chunk + kWarps + lane);
      if (index < count_) {
        const int offset = index << staging_.tile_bits;
        const int length = min(length_ - offset, 1 << staging_.tile_bits);
        const uint32_t up_to = warp_inclusive_sum(own.kept);
        function(Tile{tile_ + index, begin_ + offset, length, room - min(room, below), own,
                      up_to - own.kept, __shfl_sync(kFullWarp, up_to, kWarpSize - 1)});
      }
      room -= min(room, of_chunk);
    }
  }

  // By the block. 4 bytes for each tile of the range up to these, most from the cache: 64 KB at
  // most for 2^28 elements.
  __device__ Holding sum_totals(unsigned range_begin, Shared& shared) const {
    Holding sum = {0, 0, false};
#pragma unroll 8
    for (unsigned t = range_begin + thread_index(); t < tile_ + count_; t += kThreads) {
      const uint32_t total = staging_.totals[t];
      (t < tile_ ? sum.before : sum.own) += total & 0xffff;
      sum.non_finite |= total >> 31 != 0;
    }
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      sum.before += __shfl_xor_sync(kFullWarp, sum.before, distance);
      sum.own += __shfl_xor_sync(kFullWarp, sum.own, distance);
    }
    sum.non_finite = __any_sync(kFullWarp, sum.non_finite) != 0;
    if (lane_index() == 0) shared.holding[warp_index()] = sum;
    __syncthreads();
    sum = shared.holding[0];
    for (int w = 1; w < kWarps; ++w) {
      sum.before += shared.holding[w].before;
      sum.own += shared.holding[w].own;
      sum.non_finite |= shared.holding[w].non_finite;
    }
    return sum;
  }

  // By one warp, of the range's last block.
  __device__ void write_header(const Range& range, const Holding& holding) const {
    bool damage = false;
    for (int64_t i = lane_index(); i < args_.num_status; i += kWarpSize) {
      damage |= args_.status[i] != 0;
    }
    damage = __any_sync(kFullWarp, damage) != 0;
    if (lane_index() != 0) return;
    const Word total = holding.before + holding.own, capacity = args_.capacity;
    PayloadHeader header = {};
    header.magic = kPayloadMagic;
    header.version = kPayloadVersion;
    header.value_dtype = static_cast<uint8_t>(args_.value_dtype);
    header.flags = (total > capacity ? kFlagOverflow : 0) |
                   (holding.non_finite ? kFlagNonFinite : 0) | (damage ? kFlagDamage : 0);
    header.numel = static_cast<uint64_t>(range.end - range.begin);
    header.capacity = static_cast<uint32_t>(capacity);
    header.count = static_cast<uint32_t>(min(total, capacity));
    *reinterpret_cast<PayloadHeader*>(payload_) = header;
    // Of an empty range the only start: its tile has no payload block.
    starts()[num_blocks(range.end - range.begin)] = header.count;
  }

  // The staged entries of a tile, those of several slots side by side. Returns whether there are
  // others.
  __device__ bool place(const Tile& tile, bool one) const {
    if (lane_index() == 0 && tile.length > 0 && tile.begin % kBlock == 0) {
      const int64_t range_length = range_blocks(args_.numel, args_.ranges) * kBlock;
      starts()[tile.begin % range_length / kBlock] = number(tile, 0);
    }
    const Segments segments =
        one ? Segments{} : find_segments(args_, tile.begin, tile.begin + tile.length);
    const int64_t block = tile.begin & ~(kBlock - 1);
    constexpr int kAhead = 4;
    for (int first = 0; first < kWarps; first += kAhead) {
      uint32_t at[kAhead], count[kAhead], most = 0;
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        at[a] = __shfl_sync(kFullWarp, tile.before, first + a);
        count[a] = __shfl_sync(kFullWarp, tile.word.staged, first + a);
        most = max(most, count[a]);
      }
      const uint8_t* slots = staging_.slot(int64_t{tile.number} * kWarps + first);
      for (uint32_t i = lane_index(); i < most; i += kWarpSize) {
        uint32_t position[kAhead], bits[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (i >= count[a]) continue;
          const uint8_t* entries = slots + a * staging_.slot_bytes;
          position[a] = reinterpret_cast<const uint16_t*>(entries)[i];
          bits[a] = load_value(entries + 2 * staging_.room, i, args_.value_dtype);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (i >= count[a]) continue;
          const int64_t element = block + position[a];
          if (at[a] + i < tile.room) {
            put(number(tile, at[a] + i), position[a], bits[a]);
          } else if (is_finite(payload_value(bits[a], args_.value_dtype))) {
            float& left = args_.residual[element];  // of what is not finite nothing was taken
            left = restore(left, bits[a], args_.value_dtype);
          }
          if (!segments.one()) count_entry(segments, element);
        }
      }
    }
    const bool deferred = deferred_of(tile) != 0;
    if (!one && (segments.one() || !deferred)) count_tile(tile, segments);
    return deferred;
  }

  // A bit for each warp tile of which something was not staged.
  __device__ unsigned deferred_of(const Tile& tile) const {
    const int done = lane_index() * staging_.warp_tile() + static_cast<int>(tile.word.rows) * kRow;
    return __ballot_sync(kFullWarp, lane_index() < kWarps && done < end_of(tile, lane_index()));
  }
  __device__ int end_of(const Tile& tile, int w) const {
    return min(tile.length, (w + 1) * staging_.warp_tile());
  }

  // Once all entries of a tile are counted.
  __device__ void count_tile(const Tile& tile, const Segments& segments) const {
    __syncwarp();
    for (int s = lane_index(); s < segments.count; s += kWarpSize) {
      const int64_t segment = segments.first + s;
      if (segment_begin(args_, segment) >= segment_begin(args_, segment + 1)) continue;
      add_to_segment(args_, staging_.segments, segment, segments.one() ? tile.kept : 0, 1,
                     staging_.tile_bits);
    }
  }

  // The number in the payload of a tile's entry for which there is room, or of its end.
  __device__ uint32_t number(const Tile& tile, uint32_t entry) const {
    return static_cast<uint32_t>(args_.capacity) - tile.room + entry;
  }
  __device__ void put(uint32_t at, uint32_t position, uint32_t bits) const {
    reinterpret_cast<uint16_t*>(payload_ + layout_.positions)[at] = static_cast<uint16_t>(position);
    store_value(payload_ + layout_.values, at, bits, args_.value_dtype);
  }

  // Where segments share a tile, each of its entries is counted by itself.
  __device__ void count_entry(const Segments& segments, int64_t element) const {
    add_to_segment(args_, staging_.segments, segment_of(args_, segments, element), 1, 0,
                   staging_.tile_bits);
  }

  // What the first kernel counted and left as it was. Grad and residual have not changed since, and
  // the segments are found for the same elements, so the same entries are kept.
  __device__ void redo(const Tile& tile, bool one) const {
    const unsigned deferred = deferred_of(tile);
    if (deferred == 0) return;
    const Segments of_tile =
        one ? Segments{} : find_segments(args_, tile.begin, tile.begin + tile.length);
    for (unsigned left = deferred; left != 0; left &= left - 1) {
      const int w = __ffs(static_cast<int>(left)) - 1;
      const int64_t begin = tile.begin + w * staging_.warp_tile();
      const int length = end_of(tile, w) - w * staging_.warp_tile();
      const Segments segments = find_segments(args_, begin, begin + length);
      uint32_t entry = __shfl_sync(kFullWarp, tile.before + tile.word.staged, w);
      // No further than what was counted, whatever the offsets are: others' entries are behind it.
      const uint32_t counted = __shfl_sync(kFullWarp, tile.before + tile.word.kept, w);
      const int row = __shfl_sync(kFullWarp, tile.word.rows, w);
      for_each_row<Grad>(args_, segments, begin, length, row, aligned_, [&](Row& own) {
        float* residual = args_.residual + begin + own.offset;
        const uint32_t up_to = warp_inclusive_sum(__popc(own.kept));
        uint32_t at = entry + up_to - __popc(own.kept);
        entry += __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
#pragma unroll
        for (int e = 0; e < kVectorElements; ++e) {
          if (!(own.kept >> e & 1)) continue;
          float& sum = own.sums[0][e];
          const Taken taken = take(sum, args_.value_dtype);
          const bool fits = at < min(tile.room, counted);
          if (fits) put(number(tile, at), (begin + own.offset + e) % kBlock, taken.bits);
          if (!is_finite(sum)) {
            sum = finite_or_zero(residual[e]);
          } else if (fits) {
            sum = taken.left;
          }
          if (!of_tile.one()) count_entry(of_tile, begin + own.offset + e);
          ++at;
        }
        if (!kHasGrad<Grad> && own.kept == 0) return;
        if (own.whole && own.owned == 15) {
          stream_out(residual, own.sums[0]);
          return;
        }
#pragma unroll
        for (int e = 0; e < kVectorElements; ++e) {
          if (own.owned >> e & 1) residual[e] = own.sums[0][e];
        }
      });
    }
    if (!of_tile.one()) count_tile(tile, of_tile);
  }

  __device__ uint32_t* starts() const {
    return reinterpret_cast<uint32_t*>(payload_ + layout_.starts);
  }

  const MaskPackArgs& args_;
  const PayloadLayout& layout_;
  const Staging& staging_;
  uint8_t* const payload_;
  const unsigned tile_, count_;  // the first, of all tiles
  const bool aligned_;
  int64_t begin_;  // in elements
  int length_;     // below 2^30, of tensors below 2^38
};

template <typename Grad>
__global__ void __launch_bounds__(kThreads, kPlaceMinBlocks)
    mask_pack_place_kernel(MaskPackArgs args, RangeTiles tiles, PayloadLayout layout,
                           Staging staging, unsigned parts, unsigned per_part, bool aligned) {
  DCT_SHARED(typename TilePlacer<Grad>::Shared, shared);
  const unsigned range = blockIdx.x / parts, first = blockIdx.x % parts * per_part;
  const unsigned last = min(first + per_part, tiles.count_of(range));
  if (first >= last) return;
  TilePlacer<Grad>(args, tiles, layout, staging, range, first, last, aligned)
      .run(tiles, range, shared);
}

}  // namespace dct::cuda
