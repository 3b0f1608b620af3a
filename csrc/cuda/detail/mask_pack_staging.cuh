#pragma once

// What mask_pack's two kernels share: where the first leaves what it finds, and how both go through
// elements that it did not stage.

#include "mask_pack_segments.cuh"
#include "range_tiles.cuh"

namespace dct::cuda {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
template <typename Grad>
constexpr bool kHasGrad = !std::is_same_v<Grad, NoGrad>;

// A block's tile is that of its kWarps warps. Every word is written before it is read: nothing need
// be cleared before the call.
struct Staging {
  int tile_bits;  // log2 of a block's tile, which divides a payload block
  uint32_t room;  // entries of a warp, a multiple of 8
  int64_t slot_bytes;
  Word* segments;    // [num_segments] of mask_pack_segments.cuh
  uint32_t* totals;  // [tiles]: kept | whether one of them is not finite << 31
  uint32_t* words;   // [tiles, kWarps], below
  uint8_t* slots;    // [tiles, kWarps, slot_bytes]: u16 positions[room], values[room]

  __device__ int warp_tile() const { return 1 << tile_bits >> 3; }
  __device__ uint8_t* slot(int64_t index) const { return slots + index * slot_bytes; }
};
static_assert(kWarps == 8, "warp_tile()");

// Of a warp's tile: how many are kept, how many of them staged, and the row at which the others
// begin: the rows before it are done, and of it and those behind it nothing has been written.
struct WarpWord {
  uint32_t kept, staged, rows;
  __device__ explicit WarpWord(uint32_t word)
      : kept(word & 0xfff), staged(word >> 12 & 0xfff), rows(word >> 24) {}
  __device__ static uint32_t of(uint32_t kept, uint32_t staged, uint32_t rows) {
    return kept | staged << 12 | rows << 24;
  }
};

// Four elements of a thread, bit e of the masks for each: in the tensor and in no skipped segment;
// and kept.
struct Row {
  int offset;  // of the thread's first element in the tile
  bool whole;  // in the tensor, and vectors may be read and written
  float sums[1][kVectorElements];
  uint32_t owned, kept;
};

// By one warp: calls function(row) for the rows from `row` on of a tile of any length and
// alignment, the next being on its way. What is regular mask_pack_stage.cuh does faster.
template <typename Grad, typename Function>
__device__ void for_each_row(const MaskPackArgs& args, const Segments& segments, int64_t tile,
                             int length, int row, bool aligned, Function function) {
  const float* residual = args.residual + tile;
  const Grad* grad = static_cast<const Grad*>(args.grad) + (kHasGrad<Grad> ? tile : 0);
  const float scale = args.inv_scale != nullptr ? *args.inv_scale : 1.0f;
  float history[kVectorElements] = {};
  Grad gradient[kVectorElements] = {};
  const int whole = aligned ? length / kRow : 0;  // rows
  const auto load = [&](int offset) {
    if (row < whole) {
      stream_in(residual + offset, history);
      stream_in(grad + offset, gradient);
      return;
    }
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      if (offset + e >= length) continue;
      history[e] = residual[offset + e];
      if constexpr (kHasGrad<Grad>) gradient[e] = grad[offset + e];
    }
  };
  int offset = row * kRow + lane_index() * kVectorElements;
  load(offset);
  while (row * kRow < length) {
    Row own = {offset, row < whole, {}, 0, 0};
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      own.sums[0][e] = accumulate(history[e], gradient[e], scale);
      if (offset + e < length) own.owned |= 1u << e;
    }
    ++row;
    offset += kRow;
    load(offset);
    uint32_t skipped = 0;
    own.kept = segments.plain() ? mark(own.sums, segments.tau)
                                : mark_across(args, segments, tile + own.offset, own.sums, skipped);
    own.owned &= ~skipped;
    own.kept &= own.owned;
    function(own);
  }
}

// What the residual keeps of a sum that is not finite: what it had.
__device__ inline float finite_or_zero(float old) { return is_finite(old) ? old : 0.0f; }

}  // namespace dct::cuda
