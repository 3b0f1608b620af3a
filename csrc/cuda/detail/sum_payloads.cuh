#pragma once

// Sums the dense payloads of all ranks, row by row, in rank order from +0.0. A thread block owns a
// payload block, and each of its warps sums two rows. In a small grid, a thread block may own half
// of a payload block. A thread block checks the headers of up to kThreads ranks once.

#include "device.cuh"
#include "elements.cuh"
#include "sum_trits.cuh"

namespace dct::cuda {

constexpr int kBlockRows = kBlock / kRow;
constexpr int kSumMinBlocks = 2;  // 128 registers for 32 or more sums and for codes in flight
constexpr int kPrefetched = 2;    // ranks whose rows are prefetched before the headers are checked

struct RankPayloads {
  const uint8_t* data;  // [ranks, ranges, nbytes]
  int64_t ranks, ranges, nbytes;
  int32_t* status;  // [ranks]
};

struct SumShared {
  RangeTiles::Tile block;
  bool valid[kThreads];  // whether the header is valid, for the ranks checked together
};

// Staging vectors of one warp, in dynamic shared memory.
template <PayloadFormat kFormat>
constexpr int kStagingVectors = RowSums<kFormat>::kRows * RowSums<kFormat>::kStagedRow;
// The number of passes in which the warps of a block sum its rows. A small grid, as for one
// rank's part of a tensor, is `split`: each pass of a payload block has its own thread block.
template <PayloadFormat kFormat>
constexpr int kPasses = kBlockRows / (RowSums<kFormat>::kRows * kWarps);
template <PayloadFormat kFormat>
__device__ unsigned block_index(bool split) {
  return split ? blockIdx.x / kPasses<kFormat> : blockIdx.x;
}
template <PayloadFormat kFormat>
constexpr size_t kStagingBytes = sizeof(float4) * kWarps * kStagingVectors<kFormat>;

// By a block.
template <PayloadFormat kFormat>
__device__ void check_headers(const RankPayloads& payloads, int64_t begin, int count,
                              SumShared& shared) {
  const int index = thread_index();
  if (index >= count) return;
  const int64_t rank = begin + index;
  const RangeTiles::Tile& block = shared.block;
  const auto* words = reinterpret_cast<const uint4*>(
      payloads.data + (rank * payloads.ranges + block.range) * payloads.nbytes);
  const uint4 read[] = {words[0], words[1], words[2], words[3]};
  PayloadHeader header;
  static_assert(sizeof(header) == sizeof(read));
  memcpy(&header, read, sizeof(header));
  shared.valid[index] = quantized_header_ok(header, block.range_numel, kFormat);
  // Only the first block of a range reports the error, although all its blocks detect it.
  if (!shared.valid[index] && block.index == 0) atomicOr(&payloads.status[rank], kStatusHeader);
}

// Prefetches the block's rows of the first ranks into the L2 cache. By a block.
template <PayloadFormat kFormat>
__device__ void prefetch_rows(const RankPayloads& payloads, const RangeTiles::Tile& block) {
  const int64_t row = int64_t{block.index} * kBlockRows;
  const auto bytes =
      static_cast<int>(num_rows(block.bounds.end - block.bounds.begin)) * row_bytes(kFormat);
  const int ranks = static_cast<int>(min(payloads.ranks, int64_t{kPrefetched}));
  for (int rank = 0; rank < ranks; ++rank) {
    const uint8_t* rows = payloads.data + (rank * payloads.ranges + block.range) * payloads.nbytes +
                          sizeof(PayloadHeader) + row * row_bytes(kFormat);
    for (int at = thread_index() * kCacheLine; at < bytes; at += kThreads * kCacheLine) {
      prefetch_line(rows + at);
    }
  }
}

// Adds rows of the payloads of `count` ranks, which begin at `row` and are `stride` bytes apart.
// Loads the rows of kInFlight ranks before it uses the first. By a warp.
template <PayloadFormat kFormat>
__device__ void add_ranks(const uint8_t* row, int64_t stride, int count, int rows,
                          const bool* valid, float4* staging, RowSums<kFormat>& sums) {
  constexpr int kInFlight = RowSums<kFormat>::kInFlight;
#pragma unroll 1
  for (int p = 0; p < count; p += kInFlight, row += kInFlight * stride) {
    typename RowSums<kFormat>::Loaded loaded[kInFlight];
    uint32_t used = 0;
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (p + k >= count || !valid[p + k]) continue;
      loaded[k] = RowSums<kFormat>::load(row + k * stride, rows);
      used |= 1u << k;
    }
    sums.add(loaded, used, staging);
  }
}

// Calls finish(row, sums) for the rows of shared.block, each by one warp. By a block.
template <PayloadFormat kFormat, typename Finish>
__device__ void sum_rows(const RankPayloads& payloads, const RangeTiles& blocks, bool split,
                         SumShared& shared, float4* staging, Finish finish) {
  constexpr int kRows = RowSums<kFormat>::kRows;  // rows that a warp sums together
  const RangeTiles::Tile& block = shared.block;
  if (thread_index() == 0) shared.block = blocks.locate(block_index<kFormat>(split));
  __syncthreads();
  const int begin_pass = split ? static_cast<int>(blockIdx.x % kPasses<kFormat>) : 0;
  const int end_pass = split ? begin_pass + 1 : kPasses<kFormat>;
  staging += warp_index() * kStagingVectors<kFormat>;
#pragma unroll 1
  for (int pass = begin_pass; pass < end_pass; ++pass) {
    const int first = (pass * kWarps + warp_index()) * kRows;
    const auto in_block = static_cast<int>(num_rows(block.bounds.end - block.bounds.begin));
    const int rows = min(in_block - first, kRows);
    RowSums<kFormat> sums;
#pragma unroll 1
    for (int64_t begin = 0; begin < payloads.ranks; begin += kThreads) {
      const int count = static_cast<int>(min(payloads.ranks - begin, int64_t{kThreads}));
      if (pass == begin_pass || payloads.ranks > kThreads) {
        if (pass > begin_pass || begin > 0) __syncthreads();  // until earlier ranks are added
        check_headers<kFormat>(payloads, begin, count, shared);
        __syncthreads();
      }
      if (rows <= 0) continue;
      const uint8_t* row =
          payloads.data + (begin * payloads.ranges + block.range) * payloads.nbytes +
          sizeof(PayloadHeader) + (int64_t{block.index} * kBlockRows + first) * row_bytes(kFormat);
      add_ranks(row, payloads.ranges * payloads.nbytes, count, rows, shared.valid, staging, sums);
    }
    if (rows > 0) sums.stage(staging);
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      RowEntries x;
      sums.take(staging + r * RowSums<kFormat>::kStagedRow, x);
      finish(first + r, x);
    }
    __syncwarp();
  }
}

// Launches a kernel that calls sum_rows.
template <PayloadFormat kFormat, auto kKernel, typename Args>
cudaError_t launch_sum(const Args& args, const RangeTiles& blocks, bool aligned,
                       cudaStream_t stream) {
  constexpr int kBytes = kStagingBytes<kFormat>;
  const cudaError_t allowed = allow_shared_bytes<kKernel>(kBytes);
  if (allowed != cudaSuccess) return allowed;
  const bool split = blocks.total < 2 * multiprocessors();
  return launch(kKernel, blocks.total * (split ? kPasses<kFormat> : 1), kThreads, kBytes, stream,
                args, blocks, split, aligned);
}

}  // namespace dct::cuda
