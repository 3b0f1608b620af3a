// mask_pack.cu -- error feedback, threshold and ordered compaction in one streaming pass.
//
// A block takes the next tile of 4,096 elements, reads residual and gradient into registers, writes
// their sums to the residual, moves the few that it keeps to shared memory, where neighbouring
// threads find neighbouring entries, takes from the residual what will be packed, publishes its
// count, looks back for what the tiles before it kept, and writes its entries behind theirs.
#include "detail/launch.cuh"
#include "detail/look_back.cuh"
#include "detail/mask_pack_tile.cuh"
#include "mask_pack.cuh"

namespace dct::cuda {
namespace {

using Policy = MaskPackPolicy;

struct Scratch {
  Word* tiles;     // [tiles] of look_back.cuh
  Word* segments;  // [num_segments] of mask_pack_tile.cuh
  unsigned* ticket;
};

struct Shared {
  MaskPackTile tile;
  uint32_t warp_count[kWarps];   // kept << 1 | whether one of them is not finite
  uint32_t warp_before[kWarps];  // kept by the warps before
  uint32_t kept;                 // by the tile
  Word before;                   // kept by the tiles before in the range
  // A warp's entries, in order, from the first of its elements on.
  float acc[kTile];
  uint16_t offset[kTile];  // in the tile
};

template <typename Grad>
constexpr bool kHasGrad = !std::is_same_v<Grad, NoGrad>;

// Four rows' counts, 8 bits each: a row of a warp has 128 elements.
__device__ uint32_t row_counts(uint32_t kept) {
  uint32_t counts = 0;
#pragma unroll
  for (int j = 0; j < Policy::kVectors; ++j) counts |= __popc(kept >> (4 * j) & 15) << (8 * j);
  return counts;
}
__device__ uint32_t sum_rows(uint32_t counts) {
  return (counts & 255) + (counts >> 8 & 255) + (counts >> 16 & 255) + (counts >> 24);
}

// By one warp, while another looks back.
__device__ void count_seen(const MaskPackArgs& args, const Scratch& scratch, const Shared& shared) {
  const MaskPackTile& tile = shared.tile;
  if (tile.at.bounds.begin == tile.at.bounds.end || args.num_segments == 0) return;
  Word kept = 0;  // across segments, each thread has added what it kept
  if (tile.one_segment) {
    for (uint32_t count : shared.warp_count) kept += count >> 1;
  }
  const int lane = lane_index();
  for (int64_t s = tile.first_segment + lane; s <= tile.last_segment; s += kWarpSize) {
    const bool empty = segment_begin(args, s) >= segment_begin(args, s + 1);
    if (!empty) add_to_segment(args, scratch.segments, s, kept, 1);
  }
}

// By one warp: whether a payload of the last step was damaged.
__device__ bool any_damage(const MaskPackArgs& args) {
  bool damage = false;
  for (int64_t i = lane_index(); i < args.num_status; i += kWarpSize) damage |= args.status[i] != 0;
  return __any_sync(kFullWarp, damage) != 0;
}

// By one warp: adds up the warps' counts, looks back, and writes what each tile owes the payload.
__device__ void find_place(const MaskPackArgs& args, const PayloadLayout& layout, Word* words,
                           Shared& shared) {
  const int lane = lane_index();
  const RangeTiles::Tile& at = shared.tile.at;
  const uint32_t mine = lane < kWarps ? shared.warp_count[lane] : 0;
  const uint32_t up_to = warp_inclusive_sum(mine >> 1);
  if (lane < kWarps) shared.warp_before[lane] = up_to - (mine >> 1);
  const TileCount own = {__shfl_sync(kFullWarp, up_to, kWarpSize - 1),
                         __any_sync(kFullWarp, mine & 1) != 0};
  const bool damage = at.last && any_damage(args);
  const TileCount before = look_back(words, at.index, own);
  if (lane != 0) return;
  shared.kept = static_cast<uint32_t>(own.count);
  shared.before = before.count;

  uint8_t* payload = args.payload + at.range * layout.nbytes;
  auto* starts = reinterpret_cast<uint32_t*>(payload + layout.starts);
  const Word capacity = args.capacity, total = before.count + own.count;
  constexpr int kTilesPerBlock = kBlock / kTile;
  if (at.index % kTilesPerBlock == 0) {
    starts[at.index / kTilesPerBlock] =
        static_cast<uint32_t>(before.count < capacity ? before.count : capacity);
  }
  if (!at.last) return;
  const PayloadHeader header = payload_header(at.range_numel, args.capacity, args.value_dtype,
                                              total, before.non_finite || own.non_finite, damage);
  *reinterpret_cast<PayloadHeader*>(payload) = header;
  starts[num_blocks(at.range_numel)] = header.count;
}

// By one warp: moves what its lanes keep to shared memory, in order. Returns how much.
__device__ uint32_t collect(const Elements& own, Shared& shared) {
  const uint32_t rows = row_counts(own.kept);
  const uint32_t rows_up_to = warp_inclusive_sum(rows);
  const uint32_t rows_total = __shfl_sync(kFullWarp, rows_up_to, kWarpSize - 1);
  const uint32_t rows_before = rows_up_to - rows;
  uint32_t row_begin = warp_index() * kWarpTile;
#pragma unroll
  for (int j = 0; j < Policy::kVectors; ++j) {
    const uint32_t in_row = rows_total >> (8 * j) & 255;
    if (in_row == 0) continue;
    uint32_t entry = row_begin + (rows_before >> (8 * j) & 255);
    row_begin += in_row;
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      if (!(own.kept >> (4 * j + e) & 1)) continue;
      shared.acc[entry] = own.acc[j][e];
      shared.offset[entry] = static_cast<uint16_t>(thread_offset() + j * kRow + e);
      ++entry;
    }
  }
  return sum_rows(rows_total);
}

// By one warp: the residual of its entries, if all will be packed, which is nearly always so. Needs
// no prefix, so these stores wait for nobody. Returns whether an entry is not finite.
template <typename Grad>
__device__ bool subtract(const MaskPackArgs& args, const Shared& shared, uint32_t count) {
  const uint32_t begin = warp_index() * kWarpTile;
  float* residual = args.residual + shared.tile.at.bounds.begin;
  bool non_finite = false;
  for (uint32_t i = begin + lane_index(); i < begin + count; i += kWarpSize) {
    const float acc = shared.acc[i];
    if (is_finite(acc)) {
      residual[shared.offset[i]] = __fsub_rn(acc, through_payload(acc, args.value_dtype));
    } else {
      if (!kHasGrad<Grad>) residual[shared.offset[i]] = 0.0f;
      non_finite = true;
    }
  }
  return __any_sync(kFullWarp, non_finite) != 0;
}

// Writes the entries in order; those beyond the capacity go back to the residual.
__device__ void pack(const MaskPackArgs& args, const PayloadLayout& layout, const Shared& shared) {
  const auto first = static_cast<uint32_t>(thread_index());
  if (first >= shared.kept) return;
  const Word capacity = args.capacity, before = min(shared.before, capacity);
  const auto room = static_cast<uint32_t>(min(capacity - before, Word{kTile}));
  const int64_t begin = shared.tile.at.bounds.begin;
  uint8_t* payload = args.payload + shared.tile.at.range * layout.nbytes;
  auto* positions = reinterpret_cast<uint16_t*>(payload + layout.positions) + before;
  uint8_t* values = payload + layout.values + before * itemsize(args.value_dtype);
  for (uint32_t entry = first; entry < shared.kept; entry += Policy::kThreads) {
    int warp = 0;
#pragma unroll
    for (int w = 1; w < kWarps; ++w) warp += entry >= shared.warp_before[w];
    const uint32_t i = warp * kWarpTile + entry - shared.warp_before[warp];
    const float acc = shared.acc[i];
    const uint32_t offset = shared.offset[i];
    if (entry < room) {
      positions[entry] = static_cast<uint16_t>(static_cast<uint32_t>(begin) % kBlock + offset);
      store_payload_value(values, entry, acc, args.value_dtype);
    } else if (is_finite(acc)) {
      args.residual[begin + offset] = acc;
    }
  }
}

// Segments without elements are in no tile: the first blocks see to them.
__device__ void clear_empty(const MaskPackArgs& args, int work) {
  if (int64_t{work} * Policy::kThreads >= args.num_segments) return;
  const int64_t stride = int64_t{gridDim.x} * Policy::kThreads;
  for (int64_t s = int64_t{work} * Policy::kThreads + thread_index(); s < args.num_segments;
       s += stride) {
    if (segment_begin(args, s) >= segment_begin(args, s + 1)) args.seen[s] = 0;
  }
}

template <typename Grad>
__global__ void __launch_bounds__(Policy::kThreads, kHasGrad<Grad> ? Policy::kMinBlocks
                                                                   : Policy::kMinBlocksWithoutGrad)
    mask_pack_kernel(MaskPackArgs args, RangeTiles tiles, PayloadLayout layout, Scratch scratch,
                     bool aligned) {
  DCT_SHARED(Shared, shared);
  const int warp = warp_index(), lane = lane_index();
  if (warp == 0) {
    const MaskPackTile tile = begin_tile(args, tiles, scratch.ticket);
    if (lane == 0) shared.tile = tile;
  }
  __syncthreads();
  const MaskPackTile& tile = shared.tile;
  const int64_t length = tile.at.bounds.end - tile.at.bounds.begin;
  const bool skipped = tile.one_segment && tile.tau < 0.0f;
  const bool whole = aligned && length == kTile;
  const float scale = args.inv_scale != nullptr ? *args.inv_scale : 1.0f;

  Elements own = {};
  if (!skipped) {
    load<Grad>(args, tile, whole, scale, own);
    if (tile.one_segment) {
      mark(effective(tile.tau), own);
    } else {
      mark_across(args, scratch.segments, tile, own);
    }
  }
  const uint32_t count = collect(own, shared);
  if (kHasGrad<Grad> && !skipped) store_sums(args, tile, whole, own);
  __syncwarp();
  const bool non_finite = subtract<Grad>(args, shared, count);
  if (lane == 0) shared.warp_count[warp] = count << 1 | non_finite;
  __syncthreads();
  if (warp == 0) {
    find_place(args, layout, scratch.tiles + tile.at.work - tile.at.index, shared);
  } else if (warp == kWarps - 1) {
    count_seen(args, scratch, shared);
  }
  __syncthreads();
  pack(args, layout, shared);
  clear_empty(args, tile.at.work);
}

template <typename Grad>
cudaError_t run(const MaskPackArgs& args, const RangeTiles& tiles, const Scratch& scratch,
                cudaStream_t stream) {
  const bool aligned = is_aligned(args.residual, kVectorElements * sizeof(float)) &&
                       is_aligned(args.grad, kVectorElements * sizeof(Grad));
  const PayloadLayout layout =
      payload_layout(args.numel, args.capacity, args.value_dtype, args.ranges);
  return launch(mask_pack_kernel<Grad>, dim3(static_cast<unsigned>(tiles.total)), Policy::kThreads,
                0, stream, args, tiles, layout, scratch, aligned);
}

}  // namespace

// Of one size, whatever is asked for.
MaskPackSizes mask_pack_sizes(const MaskPackArgs&) { return {kWarpTile, kWarpTile}; }

int64_t mask_pack_scratch_bytes(const MaskPackArgs& args, const MaskPackSizes&) {
  const int64_t tiles = RangeTiles(args.numel, args.ranges, kTile).total;
  return sizeof(Word) * (tiles + args.num_segments + 1);
}

cudaError_t mask_pack(const MaskPackArgs& args, const MaskPackSizes&, void* scratch,
                      cudaStream_t stream) {
  const RangeTiles tiles(args.numel, args.ranges, kTile);
  if (tiles.total > kMaxGrid) return cudaErrorInvalidValue;
  auto* words = static_cast<Word*>(scratch);
  const Scratch parts = {words, words + tiles.total,
                         reinterpret_cast<unsigned*>(words + tiles.total + args.num_segments)};
  const cudaError_t cleared = cudaMemsetAsync(scratch, 0, mask_pack_scratch_bytes(args), stream);
  if (cleared != cudaSuccess) return cleared;
  if (args.grad == nullptr) return run<NoGrad>(args, tiles, parts, stream);
  return dispatch(args.grad_dtype,
                  [&](auto grad) { return run<decltype(grad)>(args, tiles, parts, stream); });
}

}  // namespace dct::cuda
