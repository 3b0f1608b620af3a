// dequantize_sum_pack.cu -- dequantize_sum and then quantize_pack of its result, for one range.
// Between the two steps, a row stays in registers.
#include "detail/quantize_entries.cuh"
#include "detail/sum_payloads.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

// residual + x * scale; 0 past `length`.
__device__ void add_residual(const float* residual, int length, bool whole, float scale,
                             RowEntries& x) {
  if (whole) {
    float old[kVectors][kVectorElements];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) stream_in(residual + column_of(v), old[v]);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) x[v][e] = accumulate(old[v][e], x[v][e], scale);
    }
    return;
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      const float* old = residual + column_of(v) + e;
      x[v][e] = is_within(v, e, length) ? accumulate(*old, x[v][e], scale) : 0.0f;
    }
    __syncwarp();  // keeps the compiler from hoisting all loads, which would not fit the registers
  }
}

template <PayloadFormat kFormat>
__global__ void __launch_bounds__(kThreads, kSumMinBlocks)
    dequantize_sum_pack_kernel(DequantizeSumPackArgs args, RangeTiles blocks, bool split,
                               bool aligned) {
  __shared__ SumShared shared;
  extern __shared__ __align__(16) float4 staging[];
  const RankPayloads payloads = {args.payloads, args.ranks, 1, args.nbytes_in, args.status};
  const auto pack = [&](int row, RowEntries& x, float4* staged) {
    const int64_t begin = shared.block.bounds.begin + row * kRow;
    const int length = static_cast<int>(min(shared.block.bounds.end - begin, kRow));
    const bool whole = aligned && length == kRow;
    float* const residual = args.residual + begin;
    add_residual(residual, length, whole, args.scale, x);
    pack_row<kFormat>(x, {residual, length}, args.payload, begin / kRow,
                      reinterpret_cast<uint8_t*>(staged));
    store_row(residual, length, whole, x);
  };
  sum_rows<kFormat>(payloads, blocks, split, shared, staging, pack);
}

}  // namespace

cudaError_t dequantize_sum_pack(const DequantizeSumPackArgs& args, cudaStream_t stream) {
  const cudaError_t headed = write_quantized_headers(args.payload, args.numel, 1, args.nbytes,
                                                     args.format, args.status, args.ranks, stream);
  if (headed != cudaSuccess) return headed;
  const RangeTiles blocks(args.numel, 1, kBlock);
  const bool aligned = is_aligned(args.residual, kVectorElements * sizeof(float));
  return dispatch(args.format, [&](auto format) {
    constexpr PayloadFormat kFormat = decltype(format)::value;
    return launch_sum<kFormat, dequantize_sum_pack_kernel<kFormat>>(args, blocks, aligned, stream);
  });
}

}  // namespace dct::cuda
