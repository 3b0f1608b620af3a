#pragma once

// The first kernel of mask_pack: every element once, and nobody waits for anybody.

#include "mask_pack_staging.cuh"

namespace dct::cuda {

// A warp reads 16 KB of float32 at a time: enough in flight, with four blocks a multiprocessor, for
// any memory so far. More, or segments that are found behind the first loads, would spill.
template <typename Grad>
constexpr int kPassVectors = kHasGrad<Grad> ? 4 : 8;
template <typename Grad>
constexpr int kStageMinBlocks =
    kHasGrad<Grad> ? 4 : 3;  // a multiprocessor: 64 or 80 registers a thread

// Vectors of which something is kept, in order of their elements. They leave before a pass is read,
// when its registers are free, and full warps of them if there are many.
constexpr uint32_t kRecords = 128, kFlushFrom = 48;
struct Records {
  alignas(16) float sums[kRecords][kVectorElements];
  uint32_t which[kRecords];  // offset in the warp's tile << 2 | which of the four are kept
};

// A warp stages its tile pass by pass: reads, marks, collects what it keeps in shared memory, where
// full warps then find it, and writes the sums to the residual. An entry's vector is written with
// it: until then the residual has what was there, which is what it keeps if a sum is not finite.
template <typename Grad>
class WarpStager {
 public:
  __device__ WarpStager(const MaskPackArgs& args, const Staging& staging, int64_t begin, int length,
                        unsigned slot, Records& records)
      : args_(args),
        staging_(staging),
        records_(records),
        begin_(begin),
        length_(length),
        slot_(slot) {}

  // Returns the WarpWord, and whether an entry is not finite.
  __device__ uint32_t run(bool aligned, bool& non_finite) {
    int rows = staging_.warp_tile() / kRow;
    const Segments segments = find_segments(args_, begin_, begin_ + length_);
    if (!segments.skipped()) {
      rows = stage(segments, aligned ? length_ / (kRow * kVectors) * kVectors : 0);
      flush();
      if (rows * kRow < length_) count(rows, aligned);
    }
    non_finite = __any_sync(kFullWarp, non_finite_) != 0;
    return WarpWord::of(kept_, staged_, rows);
  }

 private:
  static constexpr int kVectors = kPassVectors<Grad>;

  // Stages passes of whole vectors, as long as there is room. How many are kept is known before
  // anything of a pass is written, and the second kernel finds all of those left out as they were.
  __device__ int stage(Segments segments, int rows) {
    const bool whole = segments.plain();
    float* residual = args_.residual + begin_;
    const Grad* grad = static_cast<const Grad*>(args_.grad) + (kHasGrad<Grad> ? begin_ : 0);
    const float scale = args_.inv_scale != nullptr ? *args_.inv_scale : 1.0f;
    const int lane = lane_index() * kVectorElements;
    int offset = lane;
    for (; offset < rows * kRow; offset += kVectors * kRow) {
      if (waiting_ >= kFlushFrom) flush();
      if (!whole) {
        const int64_t begin = begin_ + offset - lane;
        segments = find_segments(args_, begin, begin + kVectors * kRow);
        if (segments.skipped()) break;
      }
      float sums[kVectors][kVectorElements];
      Grad gradient[kVectors][kVectorElements];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        stream_in(residual + offset + v * kRow, sums[v]);
        stream_in(grad + offset + v * kRow, gradient[v]);
      }
#pragma unroll
      for (int i = 0; i < kVectors * kVectorElements; ++i) {
        float& sum = sums[i / kVectorElements][i % kVectorElements];
        sum = accumulate(sum, gradient[i / kVectorElements][i % kVectorElements], scale);
      }
      uint32_t kept, skipped = 0;
      if (segments.plain()) {
        kept = mark(sums, segments.tau);
      } else {
        kept = mark_across(args_, segments, begin_ + offset, sums, skipped);
        if (__any_sync(kFullWarp, skipped != 0)) break;
      }
      const uint32_t of_pass = __reduce_add_sync(kFullWarp, __popc(kept));
      if (waiting_ + of_pass > kRecords || kept_ + of_pass > staging_.room) break;
      kept_ += of_pass;
      if (of_pass != 0) collect(sums, kept, offset);
      if constexpr (kHasGrad<Grad>) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if ((kept >> (4 * v) & 15) == 0) stream_out(residual + offset + v * kRow, sums[v]);
        }
      }
    }
    return offset / kRow;
  }

  __device__ void collect(const float (&sums)[kVectors][kVectorElements], uint32_t kept,
                          int offset) {
    const uint32_t below = (1u << lane_index()) - 1;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t of_vector = kept >> (4 * v) & 15;
      const uint32_t lanes = __ballot_sync(kFullWarp, of_vector != 0);
      if (of_vector != 0) {
        const uint32_t at = waiting_ + __popc(lanes & below);
        memcpy(records_.sums[at], sums[v], sizeof(sums[v]));
        records_.which[at] = (offset + v * kRow) << 2 | of_vector;
      }
      waiting_ += __popc(lanes);
    }
  }

  // Moves what has been collected to the slot and to the residual.
  __device__ void flush() {
    uint8_t* slot = staging_.slot(slot_);
    auto* positions = reinterpret_cast<uint16_t*>(slot);
    float* residual = args_.residual + begin_;
    uint8_t* values = slot + 2 * staging_.room;
    __syncwarp();
    for (uint32_t first = 0; first < waiting_; first += kWarpSize) {
      const uint32_t at = first + lane_index();
      const uint32_t which = at < waiting_ ? records_.which[at] : 0;
      const uint32_t offset = which >> 4 << 2, up_to = warp_inclusive_sum(__popc(which & 15));
      uint32_t entry = staged_ + up_to - __popc(which & 15);
      staged_ += __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
      for (uint32_t kept = which & 15; kept != 0; kept &= kept - 1) {
        const int e = __ffs(static_cast<int>(kept)) - 1;
        const float sum = records_.sums[at][e];
        const Taken taken = take(sum, args_.value_dtype);
        // The tile lies in one payload block.
        positions[entry] =
            static_cast<uint16_t>(static_cast<uint32_t>(begin_) % kBlock + offset + e);
        store_value(values, entry, taken.bits, args_.value_dtype);
        records_.sums[at][e] = taken.left;
        if (!is_finite(sum)) {
          records_.sums[at][e] = finite_or_zero(residual[offset + e]);
          non_finite_ = true;
        }
        ++entry;
      }
      if (which != 0) {
        float left[kVectorElements];
        memcpy(left, records_.sums[at], sizeof(left));
        stream_out(residual + offset, left);
      }
    }
    __syncwarp();
    waiting_ = 0;
  }

  // Counts the rest, which the second kernel will place: its header needs all counts and flags, and
  // the entries behind these their place.
  __device__ void count(int rows, bool aligned) {
    uint32_t kept = 0;
    const Segments segments = find_segments(args_, begin_, begin_ + length_);
    for_each_row<Grad>(args_, segments, begin_, length_, rows, aligned, [&](const Row& row) {
      kept += __popc(row.kept);
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) {
        non_finite_ |= (row.kept >> e & 1) && !is_finite(row.sums[0][e]);
      }
    });
    kept_ += __reduce_add_sync(kFullWarp, kept);
  }

  const MaskPackArgs& args_;
  const Staging& staging_;
  Records& records_;
  const int64_t begin_;
  const int length_;
  const unsigned slot_;
  uint32_t kept_ = 0, staged_ = 0, waiting_ = 0;
  bool non_finite_ = false;
};

template <typename Grad>
__global__ void __launch_bounds__(kThreads, kStageMinBlocks<Grad>)
    mask_pack_stage_kernel(MaskPackArgs args, RangeTiles tiles, Staging staging, bool aligned) {
  struct Shared {
    Records records[kWarps];
    uint32_t sum;  // kept | warps << 16 | those with an entry that is not finite << 24
  };
  DCT_SHARED(Shared, shared);
  if (thread_index() == 0) shared.sum = 0;
  // The words of the segments, for the second kernel, and those that are empty: no tile has them.
  for (int64_t s = int64_t{blockIdx.x} * kThreads + thread_index(); s < args.num_segments;
       s += int64_t{gridDim.x} * kThreads) {
    staging.segments[s] = 0;
    if (segment_begin(args, s) >= segment_begin(args, s + 1)) args.seen[s] = 0;
  }
  __syncthreads();

  const RangeTiles::Tile tile = tiles.locate(blockIdx.x);
  const unsigned slot = blockIdx.x * kWarps + warp_index();
  const int64_t begin = tile.bounds.begin + warp_index() * staging.warp_tile();
  const auto length = min(static_cast<int>(tile.bounds.end - begin), staging.warp_tile());
  bool non_finite = false;
  uint32_t word = 0;
  if (length > 0) {
    word = WarpStager<Grad>(args, staging, begin, length, slot, shared.records[warp_index()])
               .run(aligned, non_finite);
  }
  if (lane_index() != 0) return;
  staging.words[slot] = word;
  // The last warp to arrive has the sum: nobody waits for the slowest.
  const uint32_t own = WarpWord(word).kept | 1u << 16 | uint32_t{non_finite} << 24;
  const uint32_t sum = atomicAdd(&shared.sum, own) + own;
  if ((sum >> 16 & 255) == kWarps) {
    staging.totals[blockIdx.x] = (sum & 0xffff) | uint32_t{sum >> 24 != 0} << 31;
  }
}

}  // namespace dct::cuda
