// dequantize_sum.cu -- sums the dense payloads of all ranks, and multiplies the sums by a factor.
// The sums of a row stay in the registers of a warp while the warp adds one rank after the other.
// So each payload is read once, and the output is written once.
#include "detail/sum_payloads.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

template <typename Out>
__device__ void write_row(const DequantizeSumArgs& args, int64_t begin, int length, bool aligned,
                          float factor, const RowEntries& sums) {
  store_row(static_cast<Out*>(args.out) + begin, length, aligned && length == kRow, sums,
            [factor](float sum) { return round_result<Out>(__fmul_rn(factor, sum)); });
}

// The int4 kernel has registers for a third block. On Blackwell, the compiler would spill some.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kInt4MinBlocks = kSumMinBlocks;
#else
constexpr int kInt4MinBlocks = 3;
#endif
template <PayloadFormat kFormat>
constexpr int kMinBlocks = kFormat == PayloadFormat::kInt4 ? kInt4MinBlocks : kSumMinBlocks;

template <PayloadFormat kFormat>
__global__ void __launch_bounds__(kThreads, kMinBlocks<kFormat>)
    dequantize_sum_kernel(DequantizeSumArgs args, RangeTiles blocks, bool split, bool aligned) {
  __shared__ SumShared shared;
  extern __shared__ __align__(16) float4 staging[];
  const RankPayloads payloads = {args.payloads, args.ranks, args.ranges, args.nbytes, args.status};
  prefetch_rows<kFormat>(payloads, blocks.locate(block_index<kFormat>(split)));
  const auto write = [&](int row, const RowEntries& sums) {
    const int64_t begin = shared.block.bounds.begin + row * kRow;
    const int length = static_cast<int>(min(shared.block.bounds.end - begin, kRow));
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
  };
  sum_rows<kFormat>(payloads, blocks, split, shared, staging, write);
}

}  // namespace

cudaError_t dequantize_sum(const DequantizeSumArgs& args, cudaStream_t stream) {
  if (args.ranks > 0) {
    const cudaError_t cleared =
        cudaMemsetAsync(args.status, 0, sizeof(int32_t) * args.ranks, stream);
    if (cleared != cudaSuccess) return cleared;
  }
  const RangeTiles blocks(args.numel, args.ranges, kBlock);
  const auto item = static_cast<size_t>(itemsize(args.out_dtype));
  const bool aligned = is_aligned(args.out, kVectorElements * item);
  return dispatch(args.format, [&](auto format) {
    constexpr PayloadFormat kFormat = decltype(format)::value;
    return launch_sum<kFormat, dequantize_sum_kernel<kFormat>>(args, blocks, aligned, stream);
  });
}

}  // namespace dct::cuda
