// quantize_pack.cu -- error feedback and quantization of all entries. A small kernel writes the
// headers. In the second kernel, a warp processes a row of 1,024 entries. It issues all loads of
// residual and gradient before it uses the first value. It stores codes, scales and the new
// residual from the same registers. So every byte moves once, and no warp waits for another.
#include "detail/device.cuh"
#include "detail/elements.cuh"
#include "detail/quantize_entries.cuh"
#include "detail/row_elements.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

constexpr int kMinBlocks = 2;  // both inputs of a row are 64 registers
constexpr int64_t kTile = int64_t{kWarps} * kRow;

__global__ void __launch_bounds__(kThreads) quantized_headers_kernel(QuantizePackArgs args) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + thread_index();
  if (index >= args.ranges) return;
  const Range bounds = range_of_length(args.numel, args.range_length, index);
  *reinterpret_cast<PayloadHeader*>(args.payload + index * args.nbytes) =
      quantized_header(bounds.end - bounds.begin, args.format, false);
}

// Computes the sums of a whole row, by vectors.
template <typename Grad>
__device__ void accumulate_row(const float* residual, const Grad* grad, float scale,
                               RowEntries& x) {
  Grad gradient[kRowVectors][kVectorElements];
  if (residual != nullptr) {
#pragma unroll
    for (int v = 0; v < kRowVectors; ++v) stream_in(residual + column_of(v), x[v]);
  }
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) stream_in(grad + column_of(v), gradient[v]);
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      const float added = __fmul_rn(to_float(gradient[v][e]), scale);
      x[v][e] = residual != nullptr ? __fadd_rn(x[v][e], added) : added;
    }
  }
}

// Computes the sums of the `length` elements from `begin` on, and sets the rest of `x` to 0.
// `whole` rows are read by vectors.
__device__ void load_sums(const QuantizePackArgs& args, int64_t begin, int length, bool whole,
                          RowEntries& x) {
  const float scale = load_scale(args.inv_scale);
  const float* residual = args.residual != nullptr ? args.residual + begin : nullptr;
  if (whole) {
    switch (args.grad_dtype) {
      case DType::kBFloat16:
        return accumulate_row(residual, static_cast<const BFloat16*>(args.grad) + begin, scale, x);
      case DType::kFloat16:
        return accumulate_row(residual, static_cast<const Float16*>(args.grad) + begin, scale, x);
      default:
        return accumulate_row(residual, static_cast<const float*>(args.grad) + begin, scale, x);
    }
  } else {
#pragma unroll
    for (int v = 0; v < kRowVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) {
        const int column = column_of(v) + e;
        x[v][e] = 0.0f;
        if (!is_within(v, e, length)) continue;
        const float grad = load_element(args.grad, begin + column, args.grad_dtype);
        const float added = __fmul_rn(grad, scale);
        x[v][e] = residual != nullptr ? __fadd_rn(residual[column], added) : added;
      }
    }
  }
}

template <PayloadFormat kFormat>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    quantize_pack_kernel(QuantizePackArgs args, RangeTiles tiles, bool aligned) {
  constexpr int kStaged = kTernaryBytes<kFormat>;
  __shared__ __align__(16) uint8_t staged[kStaged > 0 ? kWarps * kStaged : 16];
  const RangeTiles::Tile tile = tiles.locate(blockIdx.x);
  const int64_t begin = tile.bounds.begin + warp_index() * kRow;
  if (begin >= tile.bounds.end) return;
  const int length = static_cast<int>(min(tile.bounds.end - begin, kRow));
  const bool whole = aligned && length == kRow;
  RowEntries x;
  load_sums(args, begin, length, whole, x);
  float* const residual = args.residual != nullptr ? args.residual + begin : nullptr;
  const int64_t row = int64_t{tile.index} * kWarps + warp_index();
  pack_row<kFormat>(x, {residual, length}, args.payload + tile.range * args.nbytes, row,
                    staged + warp_index() * kStaged);
  if (residual != nullptr) store_row(residual, length, whole, x);
}

}  // namespace

cudaError_t quantize_pack(const QuantizePackArgs& args, cudaStream_t stream) {
  const cudaError_t headed =
      launch(quantized_headers_kernel, ceil_div(args.ranges, kThreads), kThreads, 0, stream, args);
  if (headed != cudaSuccess) return headed;
  const RangeTiles tiles(args.numel, args.ranges, args.range_length, kTile);
  const auto item = static_cast<size_t>(itemsize(args.grad_dtype));
  const bool aligned = args.range_length % kVectorElements == 0 &&  // then all ranges are aligned
                       is_aligned(args.residual, kVectorElements * sizeof(float)) &&
                       is_aligned(args.grad, kVectorElements * item);
  return dispatch(args.format, [&](auto format) {
    return launch(quantize_pack_kernel<decltype(format)::value>, tiles.total, kThreads, 0, stream,
                  args, tiles, aligned);
  });
}

}  // namespace dct::cuda
