// dequantize_sum.cu -- sums the dense payloads of all ranks, row by row, in rank order from +0.0,
// and multiplies the sums by a factor.
//
// A thread block owns a payload block, and each of its warps sums two rows. The sums of a row stay
// in the registers of a warp while the warp adds one rank after the other. So each payload is read
// once, and the output is written once. In a small grid, a thread block may own half of a payload
// block. A thread block checks the headers of up to kThreads ranks once.
#include "detail/elements.cuh"
#include "detail/sum_trits.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

constexpr int kBlockRows = kBlock / kRow;
constexpr int kPrefetched = 2;  // ranks whose rows are prefetched before the headers are checked

// The int4 kernel has registers for a third block. On Blackwell, the compiler would spill some.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kInt4MinBlocks = 2;
#else
constexpr int kInt4MinBlocks = 3;
#endif
// 2: 128 registers for 32 or more sums and for codes in flight
template <PayloadFormat kFormat>
constexpr int kMinBlocks = kFormat == PayloadFormat::kInt4 ? kInt4MinBlocks : 2;

// Vectors of dynamic shared memory through which a warp moves its sums.
template <PayloadFormat kFormat>
constexpr int kStagingVectors = RowSums<kFormat>::kRows * RowSums<kFormat>::kStagedRow;
// The number of passes in which the warps of a block sum its rows. A small grid, as for one
// rank's part of a tensor, is `split`: each pass of a payload block has its own thread block.
template <PayloadFormat kFormat>
constexpr int kPasses = kBlockRows / (RowSums<kFormat>::kRows * kWarps);

struct SumShared {
  RangeTiles::Tile block;
  bool valid[kThreads];  // whether the header is valid, for the ranks checked together
};

__device__ const uint8_t* payload_of(const DequantizeSumArgs& args, int64_t rank, int range) {
  return args.payloads + (rank * args.ranges + range) * args.nbytes;
}

// By a block.
template <PayloadFormat kFormat>
__device__ void check_headers(const DequantizeSumArgs& args, int64_t begin, int count,
                              SumShared& shared) {
  const int index = thread_index();
  if (index >= count) return;
  const int64_t rank = begin + index;
  const RangeTiles::Tile& block = shared.block;
  const auto* words = reinterpret_cast<const uint4*>(payload_of(args, rank, block.range));
  const uint4 read[] = {words[0], words[1], words[2], words[3]};
  PayloadHeader header;
  static_assert(sizeof(header) == sizeof(read));
  memcpy(&header, read, sizeof(header));
  shared.valid[index] = quantized_header_ok(header, block.range_numel, kFormat);
  // Only the first block of a range reports the error, although all its blocks detect it.
  if (!shared.valid[index] && block.index == 0) {
    atomicOr(&args.status_of(rank, block.range), kStatusHeader);
  }
}

// Prefetches the block's rows of the first ranks into the L2 cache. By a block.
template <PayloadFormat kFormat>
__device__ void prefetch_rows(const DequantizeSumArgs& args, const RangeTiles::Tile& block) {
  const int64_t row = int64_t{block.index} * kBlockRows;
  const auto bytes =
      static_cast<int>(num_rows(block.bounds.end - block.bounds.begin)) * row_bytes(kFormat);
  const int ranks = static_cast<int>(min(args.ranks, int64_t{kPrefetched}));
  for (int rank = 0; rank < ranks; ++rank) {
    const uint8_t* rows =
        payload_of(args, rank, block.range) + sizeof(PayloadHeader) + row * row_bytes(kFormat);
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

template <typename Out>
__device__ void write_row(const DequantizeSumArgs& args, int64_t begin, int length, bool aligned,
                          float factor, const RowEntries& sums) {
  store_row(static_cast<Out*>(args.out) + begin, length, aligned && length == kRow, sums,
            [factor](float sum) { return round_result<Out>(__fmul_rn(factor, sum)); });
}

// Writes the sums of row `row` of a block. By a warp.
__device__ void write_sums(const DequantizeSumArgs& args, const Range& block, int row, bool aligned,
                           const RowEntries& sums) {
  const int64_t begin = block.begin + row * kRow;
  const int length = static_cast<int>(min(block.end - begin, kRow));
  const float factor =
      args.out_scale != nullptr ? __fmul_rn(args.scale, *args.out_scale) : args.scale;
  switch (args.out_dtype) {
    case DType::kBFloat16:
      return write_row<BFloat16>(args, begin, length, aligned, factor, sums);
    case DType::kFloat16:
      return write_row<Float16>(args, begin, length, aligned, factor, sums);
    default:
      return write_row<float>(args, begin, length, aligned, factor, sums);
  }
}

template <PayloadFormat kFormat>
__global__ void __launch_bounds__(kThreads, kMinBlocks<kFormat>)
    dequantize_sum_kernel(DequantizeSumArgs args, RangeTiles blocks, bool split, bool aligned) {
  constexpr int kRows = RowSums<kFormat>::kRows;  // rows that a warp sums together
  __shared__ SumShared shared;
  extern __shared__ __align__(16) float4 all_staging[];
  float4* const staging = all_staging + warp_index() * kStagingVectors<kFormat>;
  const RangeTiles::Tile& block = shared.block;
  const unsigned index = split ? blockIdx.x / kPasses<kFormat> : blockIdx.x;
  prefetch_rows<kFormat>(args, blocks.locate(index));
  if (thread_index() == 0) shared.block = blocks.locate(index);
  __syncthreads();
  const int begin_pass = split ? static_cast<int>(blockIdx.x % kPasses<kFormat>) : 0;
  const int end_pass = split ? begin_pass + 1 : kPasses<kFormat>;
#pragma unroll 1
  for (int pass = begin_pass; pass < end_pass; ++pass) {
    const int first = (pass * kWarps + warp_index()) * kRows;
    const auto in_block = static_cast<int>(num_rows(block.bounds.end - block.bounds.begin));
    const int rows = min(in_block - first, kRows);
    RowSums<kFormat> sums;
#pragma unroll 1
    for (int64_t begin = 0; begin < args.ranks; begin += kThreads) {
      const int count = static_cast<int>(min(args.ranks - begin, int64_t{kThreads}));
      if (pass == begin_pass || args.ranks > kThreads) {
        if (pass > begin_pass || begin > 0) __syncthreads();  // until earlier ranks are added
        check_headers<kFormat>(args, begin, count, shared);
        __syncthreads();
      }
      if (rows <= 0) continue;
      const uint8_t* row = payload_of(args, begin, block.range) + sizeof(PayloadHeader) +
                           (int64_t{block.index} * kBlockRows + first) * row_bytes(kFormat);
      add_ranks(row, args.ranges * args.nbytes, count, rows, shared.valid, staging, sums);
    }
    if (rows > 0) sums.stage(staging);
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      RowEntries x;
      sums.take(staging + r * RowSums<kFormat>::kStagedRow, x);
      write_sums(args, block.bounds, first + r, aligned, x);
    }
    __syncwarp();
  }
}

template <PayloadFormat kFormat>
cudaError_t run(const DequantizeSumArgs& args, cudaStream_t stream) {
  constexpr auto kKernel = dequantize_sum_kernel<kFormat>;
  constexpr int kBytes = sizeof(float4) * kWarps * kStagingVectors<kFormat>;
  const cudaError_t allowed = allow_shared_bytes<kKernel>(kBytes);
  if (allowed != cudaSuccess) return allowed;
  const RangeTiles blocks(args.numel, args.ranges, args.range_length, kBlock);
  const bool split = blocks.total < 2 * multiprocessors();
  const auto item = static_cast<size_t>(itemsize(args.out_dtype));
  const bool aligned =
      args.range_length % kVectorElements == 0 && is_aligned(args.out, kVectorElements * item);
  return launch(kKernel, blocks.total * (split ? kPasses<kFormat> : 1), kThreads, kBytes, stream,
                args, blocks, split, aligned);
}

}  // namespace

cudaError_t dequantize_sum(const DequantizeSumArgs& args, cudaStream_t stream) {
  if (args.ranks > 0) {
    const cudaError_t cleared =
        cudaMemsetAsync(args.status, 0, sizeof(int32_t) * args.ranks * args.statuses, stream);
    if (cleared != cudaSuccess) return cleared;
  }
  return dispatch(args.format,
                  [&](auto format) { return run<decltype(format)::value>(args, stream); });
}

}  // namespace dct::cuda
