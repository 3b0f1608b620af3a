// PROTOTYPE (design check only): mask_pack as two kernels, of which no block waits for another.
#include "detail/elements.cuh"
#include "detail/launch.cuh"
#include "detail/range_tiles.cuh"
#include "detail/warp.cuh"
#include "mask_pack.cuh"
#include "../common/ops.h"
#include "../common/payload.h"

#ifndef PROTO_PASSES
#define PROTO_PASSES 0
#endif
#ifndef VECTORS_NONE
#define VECTORS_NONE 8
#endif
#ifndef PROTO_ROOM
#define PROTO_ROOM 0
#endif

namespace dct::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize, kVectorElements = 4;
constexpr int kRow = kWarpSize * kVectorElements;
constexpr int kRecords = 128;  // a pass that keeps more is left to the second kernel

template <typename Grad>
using Again = std::conditional_t<std::is_same_v<Grad, NoGrad>, NoGradAgain, Grad>;

// Of four elements, that a thread reads at once: 32 registers, with a gradient or without.
template <typename Grad>
constexpr int kVectors = std::is_same_v<Grad, NoGrad> ? VECTORS_NONE : 4;
template <typename Grad>
constexpr int kPass = kRow * kVectors<Grad>;
constexpr int kPlaceThreads = 256, kPlaceWarps = kPlaceThreads / kWarpSize;
constexpr int kMostParts = 512;
constexpr int kSegmentTileBits = 26;

template <typename Grad>
constexpr bool kHasGrad = !std::is_base_of_v<NoGrad, Grad>;

struct Staging {
  Word* segments;    // [num_segments]
  uint32_t* totals;  // [tiles]: kept | non-finite << 31
  uint32_t* counts;  // [tiles, kWarps]: kept | staged << 12 | first deferred pass << 24
  uint8_t* slots;    // [tiles, kWarps, slot_bytes]
  int passes, room, warp_tile;
  int64_t slot_bytes;
  __device__ int tile() const { return warp_tile * kWarps; }
};

struct alignas(16) Record {
  float acc[kVectorElements];
  uint32_t offset;       // in the warp's tile
  uint32_t kept, owned;  // of all that the thread has in the pass
  uint32_t unused;
};

#if defined(__CUDACC__)
__device__ inline void store_record_if(bool condition, Record* record, const float (&acc)[4],
                                       uint32_t offset, uint32_t kept) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(record));
  (void)address;
  if (condition) {
    *reinterpret_cast<float4*>(record->acc) = make_float4(acc[0], acc[1], acc[2], acc[3]);
    *reinterpret_cast<uint2*>(&record->offset) = make_uint2(offset, kept);
  }
}
#define PROTO_NOINLINE __forceinline__
#else
inline void store_record_if(bool condition, Record* record, const float (&acc)[4], uint32_t offset,
                            uint32_t kept) {
  if (!condition) return;
  for (int e = 0; e < 4; ++e) record->acc[e] = acc[e];
  record->offset = offset;
  record->kept = kept;
}
#define PROTO_NOINLINE
#define __forceinline__ inline
#endif

struct Sink {
  uint16_t* positions;
  uint8_t* values;
  uint32_t limit;     // entries beyond it go back
  uint32_t position;  // of the warp tile's first element
};

template <typename Grad>
struct Elements {
  float acc[kVectors<Grad>][kVectorElements];
  uint32_t owned, kept;
};
template <typename Grad>
constexpr int kOwn = kVectors<Grad> * kVectorElements;
template <typename Grad>
constexpr uint32_t kAll = 0xffffffffu >> (32 - kOwn<Grad>);

template <typename Grad>
struct Loaded {
  float history[kVectors<Grad>][kVectorElements];
  Grad gradient[kVectors<Grad>][kVectorElements];
};

struct Segments {
  int64_t first, last;
  float tau;
  bool one;
};

__device__ inline int64_t segment_begin(const MaskPackArgs& args, int64_t index) {
  return min(max(args.segments[index], int64_t{0}), args.numel);
}
__device__ inline float effective(float tau) { return fmaxf(tau, bits_to_float(1)); }

__device__ inline Segments find_segments(const MaskPackArgs& args, int64_t begin, int64_t end) {
  const int64_t highest = args.num_segments - 1;
  Segments found = {-1, -1, -1.0f, true};
  if (begin >= end || highest < 0) return found;
  const int64_t* ends = args.segments + 1;
  const int64_t first = highest == 0 ? 0 : warp_upper_bound(ends, args.num_segments, begin);
  found.first = found.last = first < highest ? first : highest;
  found.tau = args.threshold[found.first];
  found.one = ends[found.first] >= end;
  if (!found.one) {
    const int64_t last = warp_upper_bound(ends, args.num_segments, end - 1);
    found.last = last < highest ? last : highest;
  }
  return found;
}

// The segment of an element, of those of a tile.
__device__ inline int64_t segment_of(const MaskPackArgs& args, const Segments& in, int64_t index) {
  return in.first + upper_bound(args.segments + 1 + in.first, in.last - in.first, index);
}

__device__ inline void add_to_segment(const MaskPackArgs& args, Word* words, int64_t segment,
                                      Word kept, Word tiles, int tile) {
  const Word added = kept << kSegmentTileBits | tiles;
  const Word now = atomicAdd(&words[segment], added) + added;
  if (tiles == 0) return;
  const int64_t begin = segment_begin(args, segment), end = segment_begin(args, segment + 1);
  const Word total = (end - 1) / tile - begin / tile + 1;
  // One of them, whatever the offsets are: that which reaches the total.
  const Word counted = now & ((Word{1} << kSegmentTileBits) - 1);
  if (counted < total || counted - tiles >= total) return;
  const Word seen = now >> kSegmentTileBits;
  args.seen[segment] = static_cast<int32_t>(seen < 0x7fffffff ? seen : 0x7fffffff);
}

template <typename Grad>
__device__ void load(const MaskPackArgs& args, int64_t base, bool whole, int left,
                     Loaded<Grad>& in) {
  const auto* grad = static_cast<const Grad*>(args.grad);
  if (whole) {
#pragma unroll
    for (int j = 0; j < kVectors<Grad>; ++j) {
      stream_in(args.residual + base + j * kRow, in.history[j]);
      stream_in(grad + base + j * kRow, in.gradient[j]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kOwn<Grad>; ++i) {
    const int j = i / kVectorElements, e = i % kVectorElements;
    const bool inside = j * kRow + e < left;
    in.history[j][e] = inside ? args.residual[base + j * kRow + e] : 0.0f;
    if constexpr (kHasGrad<Grad>) in.gradient[j][e] = inside ? grad[base + j * kRow + e] : Grad{};
  }
}

template <typename Grad>
__device__ void accumulate_all(const Loaded<Grad>& in, bool whole, int left, float scale,
                               Elements<Grad>& own) {
  own.owned = kAll<Grad>;
#pragma unroll
  for (int i = 0; i < kOwn<Grad>; ++i) {
    const int j = i / kVectorElements, e = i % kVectorElements;
    own.acc[j][e] = accumulate(in.history[j][e], in.gradient[j][e], scale);
    if (!whole && j * kRow + e >= left) own.owned &= ~(1u << i);
  }
}

// One subtraction and one shift an element: the sign of |acc| - tau. A NaN has none.
template <typename Grad>
__device__ inline void mark(float tau, Elements<Grad>& own) {
  uint32_t below = 0;
#pragma unroll
  for (int i = kOwn<Grad> - 1; i >= 0; --i) {
    const float over = __fsub_rn(fabsf(own.acc[i / kVectorElements][i % kVectorElements]), tau);
    below = __funnelshift_l(float_to_bits(over), below, 1);
  }
  own.kept = ~below & own.owned;
}

template <typename Grad>
__device__ inline void mark_across(const MaskPackArgs& args, const Segments& in, int64_t base,
                                   Elements<Grad>& own) {
  own.kept = 0;
  int64_t segment = -1, end = 0;
  float tau = 0.0f;
#pragma unroll
  for (int i = 0; i < kOwn<Grad>; ++i) {
    const int64_t index = base + i / kVectorElements * kRow + i % kVectorElements;
    const uint32_t bit = 1u << i;
    if (!(own.owned & bit)) continue;
    if (segment < 0 || index >= end) {
      segment = segment_of(args, in, index);
      tau = args.threshold[segment];
      end = segment == in.last ? args.numel : segment_begin(args, segment + 1);
    }
    if (tau < 0.0f) own.owned &= ~bit;
    const float acc = own.acc[i / kVectorElements][i % kVectorElements];
    if (!(tau < 0.0f) && !(fabsf(acc) < effective(tau))) own.kept |= bit;
  }
}

// The sums of vectors of which nothing is kept; the others are written with their entries.
template <typename Grad>
__device__ inline void store_sums(const MaskPackArgs& args, int64_t base, bool whole,
                                  const Elements<Grad>& own) {
#pragma unroll
  for (int j = 0; j < kVectors<Grad>; ++j) {
    if (own.kept >> (4 * j) & 15) continue;
    const uint32_t owned = own.owned >> (4 * j) & 15;
    if (whole && owned == 15) {
      stream_out(args.residual + base + j * kRow, own.acc[j]);
      continue;
    }
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      if (owned >> e & 1) args.residual[base + j * kRow + e] = own.acc[j][e];
    }
  }
}

// Appends the vectors of which something is kept, in order.
template <bool kWhole, typename Grad>
__device__ inline uint32_t push(const Elements<Grad>& own, uint32_t offset, Record* records,
                                uint32_t count) {
  const uint32_t below = (1u << lane_index()) - 1;
  uint32_t any[kVectors<Grad>], at[kVectors<Grad>];
#pragma unroll
  for (int j = 0; j < kVectors<Grad>; ++j) {
    any[j] = __ballot_sync(kFullWarp, (own.kept & (15u << (4 * j))) != 0);
    at[j] = count + __popc(any[j] & below);
    count += __popc(any[j]);
  }
#pragma unroll
  for (int j = 0; j < kVectors<Grad>; ++j) {
    store_record_if((own.kept & (15u << (4 * j))) != 0, &records[at[j]], own.acc[j],
                    offset + j * kRow, own.kept);
    if (!kWhole && (own.kept & (15u << (4 * j))) != 0) records[at[j]].owned = own.owned;
  }
  return count;
}

// By one warp: entries to the sink, from number `entry` on; vectors back to the residual.
template <typename Grad, bool kCount, bool kWhole>
__device__ uint32_t emit(const MaskPackArgs& args, Record* records, uint32_t count, int64_t begin,
                         bool aligned, const Sink& sink, uint32_t entry, bool& non_finite,
                         const Segments& in, Word* words, int tile) {
  __syncwarp();
  for (uint32_t first = 0; first < count; first += kWarpSize) {
    const uint32_t r = first + lane_index();
    const uint32_t offset = r < count ? records[r].offset : 0;
    const uint32_t row = offset / kRow % kVectors<Grad>;
    uint32_t kept = r < count ? records[r].kept >> (4 * row) & 15 : 0;
    const uint32_t own = __popc(kept);
    const uint32_t up_to = warp_inclusive_sum(own);
    uint32_t at = entry + up_to - own;
    entry += __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
    if (kept == 0) continue;
    Record& record = records[r];
    float* residual = args.residual + begin + offset;
    while (kept != 0) {
      const int e = __ffs(static_cast<int>(kept)) - 1;
      kept &= kept - 1;
      const float acc = record.acc[e];
      const bool finite = is_finite(acc);
      if (at < sink.limit) {
        sink.positions[at] = static_cast<uint16_t>(sink.position + offset + e);
        store_payload_value(sink.values, static_cast<int>(at), acc, args.value_dtype);
        record.acc[e] = __fsub_rn(acc, through_payload(acc, args.value_dtype));
      }
      if (!finite) {
        const float old = residual[e];
        record.acc[e] = is_finite(old) ? old : 0.0f;
        non_finite = true;
      }
      if constexpr (kCount) {
        if (!in.one) {
          const int64_t segment = segment_of(args, in, begin + offset + e);
          add_to_segment(args, words, segment, 1, 0, tile);
        }
      }
      ++at;
    }
    const uint32_t owned = kWhole ? 15 : record.owned >> (4 * row) & 15;
    if (kWhole || (aligned && owned == 15)) {
      float left[kVectorElements];
      const float4 vector = *reinterpret_cast<const float4*>(record.acc);
      left[0] = vector.x, left[1] = vector.y, left[2] = vector.z, left[3] = vector.w;
      stream_out(residual, left);
    } else {
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) {
        if (owned >> e & 1) residual[e] = record.acc[e];
      }
    }
  }
  __syncwarp();
  return entry;
}

__device__ inline Sink slot_of(const Staging& staging, int64_t slot) {
  uint8_t* bytes = staging.slots + slot * staging.slot_bytes;
  return {reinterpret_cast<uint16_t*>(bytes), bytes + 2 * staging.room,
          static_cast<uint32_t>(staging.room), 0};
}

struct StageShared {
  Record records[kWarps][kRecords];
  uint32_t sum;
};

struct Staged {
  uint32_t word;  // kept | staged << 12 | first deferred pass << 24
  bool non_finite;
};

// By one warp: its tile. `whole`: all of it lies in one segment, aligned, and in the tensor.
template <typename Grad, bool kWhole>
__device__ __forceinline__ Staged stage_tile(const MaskPackArgs& args, const Staging& staging, int64_t begin,
                                    int64_t end, bool aligned, const Segments& segments,
                                    float scale, const Sink& sink, Record* records,
                                    Loaded<Grad>& in) {
  const int lane = lane_index();
  uint32_t kept = 0, staged = 0, count = 0;
  int deferred = staging.passes;
  bool non_finite = false;
  const bool quick = kWhole || (segments.one && segments.tau < INFINITY);
  const float tau = effective(segments.tau);
  int64_t base = begin + lane * kVectorElements;
  for (int pass = 0; pass < staging.passes; ++pass, base += kPass<Grad>) {
    if (!kWhole && begin + pass * kPass<Grad> >= end) break;
    const bool whole = kWhole || (aligned && end - (begin + pass * kPass<Grad>) >= kPass<Grad>);
    const int left = kWhole ? 0 : static_cast<int>(end - base);
    load<Grad>(args, base, whole, left, in);
    Elements<Grad> own;
    accumulate_all(in, whole, left, scale, own);
    if (quick) {
      mark(tau, own);
    } else {
      mark_across(args, segments, base, own);
    }
    const uint32_t of_pass = __reduce_add_sync(kFullWarp, __popc(own.kept));
    kept += of_pass;
    if (!kWhole || kept > static_cast<uint32_t>(staging.room) || of_pass > kRecords ||
        deferred != staging.passes) {
      if (deferred == staging.passes) deferred = pass;
#pragma unroll
      for (int i = 0; i < kOwn<Grad>; ++i) {
        non_finite |= (own.kept >> i & 1) &&
                      !is_finite(own.acc[i / kVectorElements][i % kVectorElements]);
      }
      continue;
    }
    if (of_pass != 0) {
      if (count + of_pass > kRecords) {
        staged = emit<Grad, false, kWhole>(args, records, count, begin, aligned, sink, staged, non_finite,
                                     segments, nullptr, 0);
        count = 0;
      }
      count = push<kWhole>(own, static_cast<uint32_t>(pass * kPass<Grad> + lane * kVectorElements),
                           records, count);
    }
    if constexpr (kHasGrad<Grad>) store_sums(args, base, whole, own);
  }
  if (kWhole) {
    staged = emit<Grad, false, kWhole>(args, records, count, begin, aligned, sink, staged, non_finite,
                                 segments, nullptr, 0);
  }
  return {kept | staged << 12 | static_cast<uint32_t>(deferred) << 24, non_finite};
}

template <typename Grad>
__device__ PROTO_NOINLINE Staged stage_any(const MaskPackArgs& args, const Staging& staging,
                                           int64_t begin, int64_t end, bool aligned,
                                           const Segments& segments, float scale, const Sink& sink,
                                           Record* records) {
  Loaded<Grad> in;
  return stage_tile<Grad, false>(args, staging, begin, end, aligned, segments, scale, sink, records,
                                 in);
}

#ifndef BLOCKS_GRAD
#define BLOCKS_GRAD 4
#endif
#ifndef BLOCKS_NONE
#define BLOCKS_NONE 4
#endif

template <typename Grad>
__global__ void __launch_bounds__(kThreads, kHasGrad<Grad> ? BLOCKS_GRAD : BLOCKS_NONE)
    stage_kernel(MaskPackArgs args, RangeTiles tiles, Staging staging, bool aligned) {
  DCT_SHARED(StageShared, shared);
  const int warp = warp_index(), lane = lane_index();
  const RangeTiles::Tile at = tiles.locate(blockIdx.x);
  const int64_t begin = at.bounds.begin + warp * staging.warp_tile;
  const int64_t end = min(at.bounds.end, begin + staging.warp_tile);
  const bool whole = aligned && end - begin == staging.warp_tile;
  Loaded<Grad> in;
  if (thread_index() == 0) shared.sum = 0;
  if (int64_t{blockIdx.x} * kThreads < args.num_segments) {
    const int64_t stride = int64_t{gridDim.x} * kThreads;
    for (int64_t s = int64_t{blockIdx.x} * kThreads + thread_index(); s < args.num_segments;
         s += stride) {
      staging.segments[s] = 0;
      if (segment_begin(args, s) >= segment_begin(args, s + 1)) args.seen[s] = 0;
    }
  }
  __syncthreads();
  Staged staged = {static_cast<uint32_t>(staging.passes) << 24, false};
  if (begin < end) {
    const float scale = args.inv_scale != nullptr ? *args.inv_scale : 1.0f;
    Sink sink = slot_of(staging, int64_t{at.work} * kWarps + warp);
    sink.position = static_cast<uint32_t>(begin) % static_cast<uint32_t>(kBlock);
    const Segments segments = find_segments(args, begin, end);
    if (segments.one && segments.tau < 0.0f) {
      // Skipped.
    } else if (whole && segments.one && segments.tau < INFINITY) {
      staged = stage_tile<Grad, true>(args, staging, begin, end, aligned, segments, scale, sink,
                                      shared.records[warp], in);
    } else {
      staged = stage_any<Grad>(args, staging, begin, end, aligned, segments, scale, sink,
                               shared.records[warp]);
    }
  }
  const bool non_finite = __any_sync(kFullWarp, staged.non_finite) != 0;
  if (lane != 0) return;
  staging.counts[int64_t{at.work} * kWarps + warp] = staged.word;
  const uint32_t mine = (staged.word & 0xfff) | 1u << 16 | uint32_t{non_finite} << 24;
  const uint32_t now = atomicAdd(&shared.sum, mine) + mine;
  if ((now >> 16 & 255) == kWarps) {
    staging.totals[at.work] = (now & 0xffff) | (now >> 24 != 0 ? 1u << 31 : 0);
  }
}

// One staged entry: into the payload at its place, or what was taken of it back into the residual.
__device__ inline void place_entry(const MaskPackArgs& args, uint32_t position, uint32_t bits,
                                   Word at, int64_t element, uint16_t* positions, uint8_t* values) {
  const bool wide = args.value_dtype != DType::kBFloat16;
  if (at < static_cast<Word>(args.capacity)) {
    positions[at] = static_cast<uint16_t>(position);
    if (wide) {
      reinterpret_cast<uint32_t*>(values)[at] = bits;
    } else {
      reinterpret_cast<uint16_t*>(values)[at] = static_cast<uint16_t>(bits);
    }
    return;
  }
  const float value = bits_to_float(wide ? bits : bits << 16);
  if (is_finite(value)) args.residual[element] = __fadd_rn(args.residual[element], value);
}

struct PlaceShared {
  Record records[kPlaceWarps][kRecords];
  Word before[kPlaceWarps], own[kPlaceWarps];
  uint32_t non_finite[kPlaceWarps];
};

template <typename Grad>
__global__ void __launch_bounds__(kPlaceThreads)
    place_kernel(MaskPackArgs args, RangeTiles tiles, PayloadLayout layout, Staging staging,
                 unsigned parts, unsigned per_part, bool aligned) {
  DCT_SHARED(PlaceShared, shared);
  auto& records = shared.records;
  const int warp = warp_index(), lane = lane_index();
  const unsigned range = blockIdx.x / parts, part = blockIdx.x % parts;
  const unsigned base = tiles.first_of(range), of_range = tiles.count_of(range);
  const unsigned first = min(part * per_part, of_range), last = min(first + per_part, of_range);
  if (first >= last) return;
  const Range bounds = range_bounds(args.numel, args.ranges, range);
  const int tile = staging.tile();

  // The words of the first chunk are on their way while the tiles before are counted.
  const auto words_of = [&](unsigned index) {
    return index < last && lane < kWarps ? staging.counts[int64_t{base + index} * kWarps + lane] : 0;
  };
  const auto totals_of = [&](unsigned chunk) {
    return lane < kPlaceWarps && chunk + lane < last ? staging.totals[base + chunk + lane] & 0xffff
                                                     : 0;
  };
  uint32_t next_words = words_of(first + warp), next_totals = totals_of(first);

  // What the tiles before hold, and these.
  Word before = 0, own = 0;
  uint32_t non_finite = 0;
  for (unsigned i = thread_index(); i < last; i += kPlaceThreads) {
    const uint32_t total = staging.totals[base + i];
    (i < first ? before : own) += total & 0xffff;
    non_finite |= total >> 31;
  }
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    before += __shfl_xor_sync(kFullWarp, before, distance);
    own += __shfl_xor_sync(kFullWarp, own, distance);
  }
  non_finite = __any_sync(kFullWarp, non_finite) != 0;
  if (lane == 0) {
    shared.before[warp] = before;
    shared.own[warp] = own;
    shared.non_finite[warp] = non_finite;
  }
  __syncthreads();
  before = own = 0;
  non_finite = 0;
  for (int w = 0; w < kPlaceWarps; ++w) {
    before += shared.before[w];
    own += shared.own[w];
    non_finite |= shared.non_finite[w];
  }

  uint8_t* payload = args.payload + range * layout.nbytes;
  auto* starts = reinterpret_cast<uint32_t*>(payload + layout.starts);
  auto* positions = reinterpret_cast<uint16_t*>(payload + layout.positions);
  uint8_t* values = payload + layout.values;
  const int item = itemsize(args.value_dtype);
  const Word capacity = args.capacity;
  if (last == of_range && warp == kPlaceWarps - 1) {
    bool damage = false;
    for (int64_t i = lane; i < args.num_status; i += kWarpSize) damage |= args.status[i] != 0;
    damage = __any_sync(kFullWarp, damage) != 0;
    if (lane == 0) {
      const Word total = before + own;
      PayloadHeader header = {};
      header.magic = kPayloadMagic;
      header.version = kPayloadVersion;
      header.value_dtype = static_cast<uint8_t>(args.value_dtype);
      header.flags = (total > capacity ? kFlagOverflow : 0) | (non_finite ? kFlagNonFinite : 0) |
                     (damage ? kFlagDamage : 0);
      header.numel = static_cast<uint64_t>(bounds.end - bounds.begin);
      header.capacity = static_cast<uint32_t>(capacity);
      header.count = static_cast<uint32_t>(total < capacity ? total : capacity);
      *reinterpret_cast<PayloadHeader*>(payload) = header;
      starts[num_blocks(bounds.end - bounds.begin)] = header.count;
    }
  }
  const int64_t span_begin = bounds.begin + int64_t{first} * tile;
  const int64_t span_end = min(bounds.end, bounds.begin + int64_t{last} * tile);
  const Segments span = find_segments(args, span_begin, span_end);
  if (span.one && span.first >= 0 && thread_index() == 0) {
    add_to_segment(args, staging.segments, span.first, own, last - first, tile);
  }

  for (unsigned chunk = first; chunk < last; chunk += kPlaceWarps) {
    const unsigned index = chunk + warp;
    const uint32_t total = next_totals, mine = next_words;
    next_words = words_of(index + kPlaceWarps);
    next_totals = totals_of(chunk + kPlaceWarps);
    Word place = before + __reduce_add_sync(kFullWarp, lane < warp ? total : 0);
    before += __reduce_add_sync(kFullWarp, total);
    if (index >= last) continue;
    const int64_t begin = bounds.begin + int64_t{index} * tile;
    const int64_t end = min(bounds.end, begin + tile);
    if (lane == 0 && begin < end && (begin - bounds.begin) % kBlock == 0) {
      starts[(begin - bounds.begin) / kBlock] =
          static_cast<uint32_t>(place < capacity ? place : capacity);
    }
    const Segments in = span.one ? span : find_segments(args, begin, end);
    const uint32_t up_to = warp_inclusive_sum(mine & 0xfff);
    const uint32_t kept_in_tile = __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
    const int64_t payload_block = begin & ~(kBlock - 1);
    const bool plain = __ballot_sync(kFullWarp, lane < kWarps && index < last &&
                                                    static_cast<int>(mine >> 24) != staging.passes) == 0;
    if (plain) {
      // All of the tile's entries side by side, four of a lane in flight.
      uint32_t until[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) until[w] = __shfl_sync(kFullWarp, up_to, w);
      const uint8_t* slots = staging.slots + int64_t{base + index} * kWarps * staging.slot_bytes;
      constexpr int kAhead = 4;
      for (uint32_t first_entry = 0; first_entry < kept_in_tile;
           first_entry += kAhead * kWarpSize) {
        uint32_t position[kAhead] = {}, bits[kAhead] = {};
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          const uint32_t entry = first_entry + a * kWarpSize + lane;
          if (entry >= kept_in_tile) continue;
          uint32_t w = 0, begins = 0;
#pragma unroll
          for (int v = 0; v < kWarps - 1; ++v) {
            const bool past = entry >= until[v];
            w += past;
            begins = past ? until[v] : begins;
          }
          const uint8_t* slot = slots + w * static_cast<uint32_t>(staging.slot_bytes);
          const uint32_t i = entry - begins;
          position[a] = reinterpret_cast<const uint16_t*>(slot)[i];
          slot += 2 * staging.room;
          bits[a] = item == 4 ? reinterpret_cast<const uint32_t*>(slot)[i]
                              : reinterpret_cast<const uint16_t*>(slot)[i];
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          const uint32_t entry = first_entry + a * kWarpSize + lane;
          if (entry >= kept_in_tile) continue;
          place_entry(args, position[a], bits[a], place + entry, payload_block + position[a],
                      positions, values);
          if (!in.one) {
            add_to_segment(args, staging.segments,
                           segment_of(args, in, payload_block + position[a]), 1, 0, tile);
          }
        }
      }
    }
    for (int w = 0; w < kWarps && !plain; ++w) {
      const uint32_t word = __shfl_sync(kFullWarp, mine, w);
      const Word at = place + __shfl_sync(kFullWarp, up_to, w) - (word & 0xfff);
      const uint32_t staged = word >> 12 & 0xfff;
      const int deferred = static_cast<int>(word >> 24);
      const int64_t tile_begin = begin + w * staging.warp_tile;
      const Sink slot = slot_of(staging, int64_t{base + index} * kWarps + w);
      for (uint32_t i = lane; i < staged; i += kWarpSize) {
        const uint32_t position = slot.positions[i];
        const int64_t element = payload_block + position;
        const uint32_t bits = item == 4 ? reinterpret_cast<const uint32_t*>(slot.values)[i]
                                        : reinterpret_cast<const uint16_t*>(slot.values)[i];
        place_entry(args, position, bits, at + i, element, positions, values);
        if (!in.one) {
          add_to_segment(args, staging.segments, segment_of(args, in, element), 1, 0, tile);
        }
      }
      if (deferred == staging.passes) continue;
      // As in the first kernel, straight into the payload.
      const int64_t tile_end = min(end, tile_begin + staging.warp_tile);
      const float scale = args.inv_scale != nullptr ? *args.inv_scale : 1.0f;
      const Segments own_segments = find_segments(args, tile_begin, tile_end);
      uint32_t entry = staged;
      const Word from = min(at, capacity);
      Sink sink = {positions + from, values + from * item,
                   static_cast<uint32_t>(min(capacity - from, Word{kBlock})),
                   static_cast<uint32_t>(tile_begin % kBlock)};
      bool ignored = false;
      using In = Again<Grad>;
      const int least = kPass<Grad> / kPass<In>;
      for (int pass = deferred * least; pass < staging.passes * least; ++pass) {
        const int64_t pass_begin = tile_begin + pass * kPass<In>;
        if (pass_begin >= tile_end) break;
        const int64_t own_base = pass_begin + lane * kVectorElements;
        const bool whole = aligned && tile_end - pass_begin >= kPass<In>;
        const int left = static_cast<int>(tile_end - own_base);
        Loaded<In> loaded;
        load<In>(args, own_base, whole, left, loaded);
        Elements<In> elements;
        accumulate_all(loaded, whole, left, scale, elements);
        if (own_segments.one && own_segments.tau < INFINITY) {
          mark(effective(own_segments.tau), elements);
        } else {
          mark_across(args, own_segments, own_base, elements);
        }
        if constexpr (kHasGrad<In>) store_sums(args, own_base, whole, elements);
        const uint32_t count =
            push<false>(elements, static_cast<uint32_t>(pass * kPass<In> + lane * kVectorElements),
                 records[warp], 0);
        entry = emit<In, true, false>(args, records[warp], count, tile_begin, aligned, sink, entry, ignored, in,
                           staging.segments, tile);
      }
    }
    __syncwarp();
    if (span.one || in.first < 0) continue;
    for (int64_t s = in.first + lane; s <= in.last; s += kWarpSize) {
      if (segment_begin(args, s) >= segment_begin(args, s + 1)) continue;
      add_to_segment(args, staging.segments, s, in.one ? Word{kept_in_tile} : 0, 1, tile);
    }
  }
}

struct Plan {
  int warp_tile, room;
  int64_t slot_bytes, tiles;
};

Plan plan(const MaskPackArgs& args) {
  Plan p;
  const int least = args.grad == nullptr ? kPass<NoGrad> : kPass<float>;
  p.warp_tile = PROTO_PASSES ? PROTO_PASSES * 512 : args.numel >= int64_t{1} << 23 ? 2048
                : args.numel >= int64_t{1} << 22                                  ? 1024
                                                                                  : 512;
  p.warp_tile = max(p.warp_tile, least);
  const int64_t share =
      args.numel > 0 ? ceil_div(p.warp_tile * args.capacity * args.ranges, args.numel) : 0;
  const int64_t wanted = share + share / 2 + 24;
  const int64_t most = min(p.warp_tile, 256);  // beyond it passes are left to the second kernel
  p.room = static_cast<int>(ceil_div(wanted < most ? wanted : most, 8) * 8);
  if (PROTO_ROOM) p.room = PROTO_ROOM;
  p.slot_bytes = int64_t{p.room} * (2 + itemsize(args.value_dtype));
  p.tiles = RangeTiles(args.numel, args.ranges, int64_t{p.warp_tile} * kWarps).total;
  return p;
}

template <typename Grad>
cudaError_t run(const MaskPackArgs& args, const Plan& p, Staging staging, cudaStream_t stream) {
  staging.passes = p.warp_tile / kPass<Grad>;
  const RangeTiles tiles(args.numel, args.ranges, int64_t{p.warp_tile} * kWarps);
  const bool aligned = is_aligned(args.residual, kVectorElements * sizeof(float)) &&
                       is_aligned(args.grad, kVectorElements * sizeof(Grad));
  const PayloadLayout layout =
      payload_layout(args.numel, args.capacity, args.value_dtype, args.ranges);
  const cudaError_t staged =
      launch(stage_kernel<Grad>, dim3(static_cast<unsigned>(tiles.total)), kThreads, 0, stream, args,
             tiles, staging, aligned);
  if (staged != cudaSuccess) return staged;
  const int64_t of_range = max(int64_t{tiles.tiles_per_full}, int64_t{tiles.short_tiles});
  const int64_t most = max(of_range, int64_t{1});
  const int64_t per_part = max(ceil_div(most, kMostParts), int64_t{kPlaceWarps});
  const int64_t parts = ceil_div(most, per_part);
  return launch(place_kernel<Grad>, dim3(static_cast<unsigned>(parts * args.ranges)), kPlaceThreads,
                0, stream, args, tiles, layout, staging, static_cast<unsigned>(parts),
                static_cast<unsigned>(per_part), aligned);
}

}  // namespace

int64_t mask_pack_scratch_bytes(const MaskPackArgs& args) {
  const Plan p = plan(args);
  return 8 * args.num_segments + 16 + align16(4 * p.tiles) + align16(4 * p.tiles * kWarps) +
         p.tiles * kWarps * p.slot_bytes;
}

cudaError_t mask_pack(const MaskPackArgs& args, void* scratch, cudaStream_t stream) {
  const Plan p = plan(args);
  if (p.tiles > kMaxGrid) return cudaErrorInvalidValue;
  auto* bytes = static_cast<uint8_t*>(scratch);
  Staging staging;
  staging.segments = reinterpret_cast<Word*>(bytes);
  bytes += align16(8 * args.num_segments);
  staging.totals = reinterpret_cast<uint32_t*>(bytes);
  bytes += align16(4 * p.tiles);
  staging.counts = reinterpret_cast<uint32_t*>(bytes);
  bytes += align16(4 * p.tiles * kWarps);
  staging.slots = bytes;
  staging.warp_tile = p.warp_tile;
  staging.room = p.room;
  staging.slot_bytes = p.slot_bytes;
  if (args.grad == nullptr) return run<NoGrad>(args, p, staging, stream);
  return dispatch(args.grad_dtype,
                  [&](auto grad) { return run<decltype(grad)>(args, p, staging, stream); });
}

}  // namespace dct::cuda
