#pragma once

// The second kernel of mask_pack: entries to their place in the payload, and what was not staged.

#include "mask_pack_staging.cuh"

namespace dct::cuda {

constexpr int kPlaceMinBlocks = 3;  // a multiprocessor: at most 64 registers a thread

// What some tiles hold.
struct Holding {
  Word before, own;  // kept by the tiles of the range before these, and by these
  bool non_finite;   // of any of them
};

// A block places some neighbouring tiles of a range, a warp one at a time.
template <typename Grad>
class TilePlacer {
 public:
  struct Shared {
    Holding holding[kWarps];
  };

  __device__ TilePlacer(const MaskPackArgs& args, const RangeTiles& tiles,
                        const PayloadLayout& layout, const Staging& staging, unsigned range,
                        unsigned first, unsigned last, bool aligned)
      : args_(args),
        layout_(layout),
        staging_(staging),
        payload_(args.payload + range * layout.nbytes),
        bounds_(range_bounds(args.numel, args.ranges, range)),
        base_(tiles.first_of(range)),
        first_(first),
        last_(last),
        aligned_(aligned) {}

  __device__ void run(bool ends_range, Shared& shared) {
    const int lane = lane_index();
    uint32_t word = word_of(first_ + warp_index()), total = total_of(first_ + lane);
    const Holding holding = sum_totals(shared);
    // Who has the range's last tile has seen all of its totals.
    if (ends_range && warp_index() == kWarps - 1) write_header(holding);

    const Segments span = find_segments(args_, begin_of(first_), begin_of(last_));
    if (span.count == 1 && thread_index() == 0) {
      add_to_segment(args_, staging_.segments, span.first, holding.own, last_ - first_,
                     staging_.tile_bits);
    }
    Word before = holding.before;
    for (unsigned chunk = first_; chunk < last_; chunk += kWarps) {
      const unsigned tile = chunk + warp_index();
      const Word place = before + __reduce_add_sync(kFullWarp, lane < warp_index() ? total : 0);
      before += __reduce_add_sync(kFullWarp, total);
      const uint32_t words = word;
      word = word_of(tile + kWarps);  // the next ones are on their way
      total = total_of(chunk + kWarps + lane);
      if (tile < last_) place_tile(tile, place, words, span);
    }
  }

 private:
  __device__ int64_t begin_of(unsigned tile) const {
    return min(bounds_.end, bounds_.begin + (int64_t{tile} << staging_.tile_bits));
  }
  // A lane's warp's word of a tile, and the total of a lane's tile of a chunk.
  __device__ uint32_t word_of(unsigned tile) const {
    const bool there = tile < last_ && lane_index() < kWarps;
    return there ? staging_.words[int64_t{base_ + tile} * kWarps + lane_index()] : 0;
  }
  __device__ uint32_t total_of(unsigned tile) const {
    return lane_index() < kWarps && tile < last_ ? staging_.totals[base_ + tile] & 0xffff : 0;
  }

  // By the block. 4 bytes a tile, all from the cache: 64 KB for 2^28 elements.
  __device__ Holding sum_totals(Shared& shared) const {
    Holding sum = {0, 0, false};
#pragma unroll 8
    for (unsigned tile = thread_index(); tile < last_; tile += kThreads) {
      const uint32_t total = staging_.totals[base_ + tile];
      (tile < first_ ? sum.before : sum.own) += total & 0xffff;
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

  __device__ void write_header(const Holding& holding) const {
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
    header.numel = static_cast<uint64_t>(bounds_.end - bounds_.begin);
    header.capacity = static_cast<uint32_t>(capacity);
    header.count = static_cast<uint32_t>(min(total, capacity));
    *reinterpret_cast<PayloadHeader*>(payload_) = header;
    // Of an empty range the only start: its tile has no payload block.
    starts()[num_blocks(bounds_.end - bounds_.begin)] = header.count;
  }

  // Of a tile: where its entries go, by their number in it, and their payload block's residuals.
  struct Sink {
    uint16_t* positions;
    uint8_t* values;
    uint32_t room;  // entries; those beyond stay in the residual
    float* residual;
    uint32_t first;  // of the tile's elements in the payload block
  };

  // By one warp, whose lanes below kWarps have the words of the tile's warps.
  __device__ void place_tile(unsigned tile, Word place, uint32_t mine, const Segments& span) const {
    const int lane = lane_index();
    const int64_t begin = begin_of(tile);
    const auto length = static_cast<int>(begin_of(tile + 1) - begin);
    const auto capacity = static_cast<Word>(args_.capacity), from = min(place, capacity);
    const auto first = static_cast<uint32_t>(begin % kBlock);
    if (lane == 0 && length > 0 && first == 0) {
      starts()[(begin - bounds_.begin) / kBlock] = static_cast<uint32_t>(from);
    }
    const Sink sink = {reinterpret_cast<uint16_t*>(payload_ + layout_.positions) + from,
                       payload_ + layout_.values + from * itemsize(args_.value_dtype),
                       static_cast<uint32_t>(min(capacity - from, Word{kBlock})),
                       args_.residual + (begin - first), first};
    const Segments segments = span.one() ? span : find_segments(args_, begin, begin + length);
    const WarpWord word(mine);
    const uint32_t up_to = warp_inclusive_sum(word.kept);
    const uint32_t kept = __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
    place_staged(sink, int64_t{base_ + tile} * kWarps, up_to - word.kept, word.staged, segments);

    const int warp_tile = staging_.warp_tile(), of_warp = min(length - lane * warp_tile, warp_tile);
    const bool deferred = lane < kWarps && static_cast<int>(word.rows) * kRow < of_warp;
    for (unsigned left = __ballot_sync(kFullWarp, deferred); left != 0; left &= left - 1) {
      const int w = __ffs(static_cast<int>(left)) - 1;
      redo(sink, w * warp_tile, __shfl_sync(kFullWarp, of_warp, w),
           __shfl_sync(kFullWarp, word.rows, w),
           __shfl_sync(kFullWarp, up_to - word.kept + word.staged, w), segments);
    }

    if (span.one()) return;
    __syncwarp();  // all entries of a segment are counted before the tile is
    for (int s = lane; s < segments.count; s += kWarpSize) {
      const int64_t segment = segments.first + s;
      if (segment_begin(args_, segment) >= segment_begin(args_, segment + 1)) continue;
      add_to_segment(args_, staging_.segments, segment, segments.one() ? kept : 0, 1,
                     staging_.tile_bits);
    }
  }

  // The staged entries of a tile, those of several slots side by side. Lane w knows how many there
  // are in slot w, and how many of the tile are kept before them.
  __device__ void place_staged(const Sink& sink, int64_t slot, uint32_t before, uint32_t staged,
                               const Segments& segments) const {
    constexpr int kAhead = 4;
    for (int first = 0; first < kWarps; first += kAhead) {
      uint32_t at[kAhead], count[kAhead], most = 0;
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        at[a] = __shfl_sync(kFullWarp, before, first + a);
        count[a] = __shfl_sync(kFullWarp, staged, first + a);
        most = max(most, count[a]);
      }
      const uint8_t* slots = staging_.slot(slot + first);
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
          put(sink, at[a] + i, position[a], bits[a]);
          count_seen(sink, segments, position[a]);
        }
      }
    }
  }

  // A staged entry into the payload; one beyond the capacity back into the residual. What is not
  // finite was left there already.
  __device__ void put(const Sink& sink, uint32_t entry, uint32_t position, uint32_t bits) const {
    if (entry < sink.room) {
      sink.positions[entry] = static_cast<uint16_t>(position);
      store_value(sink.values, entry, bits, args_.value_dtype);
    } else if (is_finite(payload_value(bits, args_.value_dtype))) {
      sink.residual[position] = restore(sink.residual[position], bits, args_.value_dtype);
    }
  }

  // Where segments share the tile, each entry is counted by itself.
  __device__ void count_seen(const Sink& sink, const Segments& segments, uint32_t position) const {
    if (segments.one()) return;
    const int64_t element = sink.residual - args_.residual + position;
    add_to_segment(args_, staging_.segments, segment_of(args_, segments, element), 1, 0,
                   staging_.tile_bits);
  }

  // What the first kernel counted and left as it was, from a row of a warp's tile on. Grad and
  // residual have not changed since, and the segments are found for the same elements, so the same
  // entries are kept.
  __device__ void redo(const Sink& sink, int tile, int length, int row, uint32_t entry,
                       const Segments& of_tile) const {
    const uint32_t first = sink.first + tile;
    float* residual = sink.residual + first;
    const int64_t begin = residual - args_.residual;
    const Segments segments = find_segments(args_, begin, begin + length);
    for_each_row<Grad>(args_, segments, begin, length, row, aligned_, [&](Row& own) {
      const uint32_t up_to = warp_inclusive_sum(__popc(own.kept));
      uint32_t at = entry + up_to - __popc(own.kept);
      entry += __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) {
        if (!(own.kept >> e & 1)) continue;
        float& sum = own.sums[0][e];
        const uint32_t position = first + own.offset + e;
        const Taken taken = take(sum, args_.value_dtype);
        if (at < sink.room) put(sink, at, position, taken.bits);
        if (!is_finite(sum)) {
          sum = finite_or_zero(sink.residual[position]);
        } else if (at < sink.room) {
          sum = taken.left;
        }
        count_seen(sink, of_tile, position);
        ++at;
      }
      if (!kHasGrad<Grad> && own.kept == 0) return;
      if (own.whole && own.owned == 15) {
        stream_out(residual + own.offset, own.sums[0]);
        return;
      }
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) {
        if (own.owned >> e & 1) residual[own.offset + e] = own.sums[0][e];
      }
    });
  }

  __device__ uint32_t* starts() const {
    return reinterpret_cast<uint32_t*>(payload_ + layout_.starts);
  }

  const MaskPackArgs& args_;
  const PayloadLayout& layout_;
  const Staging& staging_;
  uint8_t* const payload_;
  const Range bounds_;
  const unsigned base_, first_, last_;
  const bool aligned_;
};

template <typename Grad>
__global__ void __launch_bounds__(kThreads, kPlaceMinBlocks)
    mask_pack_place_kernel(MaskPackArgs args, RangeTiles tiles, PayloadLayout layout,
                           Staging staging, unsigned parts, unsigned per_part, bool aligned) {
  DCT_SHARED(typename TilePlacer<Grad>::Shared, shared);
  const unsigned range = blockIdx.x / parts, of_range = tiles.count_of(range);
  const unsigned first = blockIdx.x % parts * per_part, last = min(first + per_part, of_range);
  if (first >= last) return;
  TilePlacer<Grad>(args, tiles, layout, staging, range, first, last, aligned)
      .run(last == of_range, shared);
}

}  // namespace dct::cuda
