// row_dequantize.cu -- dequantizes rows. A lane decodes one output vector at a time.
#include "detail/staged_rows.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

constexpr int kOverread = 7;  // bytes that four_bytes() reads past the first
template <RowFormat kFormat>
constexpr int kReadVectors = kStagedVectors<kFormat, kOverread>;

using WarpBytes = uint4[kReadVectors<RowFormat::kInt8>];

// Dequantizes a warp's rows [first, first + rows), each by 2^log_lanes lanes and in `parts` parts.
template <RowFormat kFormat, typename Out>
__device__ void dequantize_rows(const RowDequantizeArgs& args, int64_t first, int rows,
                                int log_lanes, int64_t parts, bool aligned, WarpBytes& shared) {
  constexpr int kElements = kVectorBytes / sizeof(Out);
  constexpr int kCodesPerByte = codes_per_byte(kFormat);
  const int lanes = 1 << log_lanes;
  const int lane = lane_index() & (lanes - 1), group = lane_index() >> log_lanes;
  const bool active = group < rows;  // the other lanes only copy bytes
  const int64_t width = args.width, bytes = row_bytes(width, kFormat);
  Out* out = static_cast<Out*>(args.out) + (first + group) * width;
  const int most = lanes * kLaneColumns, most_bytes = lanes * (kLaneColumns / kCodesPerByte);
  const UnitFloats unit_float;
  float scale = 0.0f;
  // The last part of a wide row comes first, because the scale follows it.
  for (int64_t part = parts - 1; part >= 0; --part) {
    const int64_t begin = part * most, left = width - begin, skipped = part * most_bytes;
    const bool last = part == parts - 1;
    const int columns = left < most ? static_cast<int>(left) : most;
    const int count = last ? static_cast<int>(rows * bytes - skipped) : most_bytes;
    const Span span = {args.quantized, args.rows * bytes, first * bytes + skipped, count};
    StagedBytes<kReadVectors<kFormat>, kOverread> loaded;
    loaded.load(span, true);
    const int staged = loaded.store(span, true, shared);
    const auto* staged_bytes = reinterpret_cast<const uint8_t*>(shared);
    const int row = staged + (active ? group * static_cast<int>(bytes) : 0);
    if (last) scale = scale_at(staged_bytes + row + (bytes - kScaleBytes - skipped));
    for (int c = lane * kElements; active && c < columns; c += lanes * kElements) {
      float codes[kElements];
      load_codes<kFormat>(reinterpret_cast<const uint32_t*>(shared), row, c, unit_float, codes);
      Out values[kElements];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        values[e] = round_result<Out>(__fmul_rn(codes[e], scale));
      }
      if (aligned) {
        stream_out(out + begin + c, values);
        continue;
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        if (c + e < columns) out[begin + c + e] = values[e];
      }
    }
    __syncwarp();
  }
}

template <typename Out>
__global__ void __launch_bounds__(kThreads)
    row_dequantize_kernel(RowDequantizeArgs args, int log_lanes, int64_t parts, bool aligned) {
  __shared__ WarpBytes shared[kWarps];
  const int64_t first = (int64_t{blockIdx.x} * kWarps + warp_index()) * (kWarpSize >> log_lanes);
  if (first >= args.rows) return;
  const auto rows = static_cast<int>(min(args.rows - first, int64_t{kWarpSize >> log_lanes}));
  WarpBytes& own = shared[warp_index()];
  switch (args.format) {
    case RowFormat::kInt8:
      return dequantize_rows<RowFormat::kInt8, Out>(args, first, rows, log_lanes, parts, aligned,
                                                    own);
    case RowFormat::kInt4:
      return dequantize_rows<RowFormat::kInt4, Out>(args, first, rows, log_lanes, parts, aligned,
                                                    own);
    default:
      return dequantize_rows<RowFormat::kSign, Out>(args, first, rows, log_lanes, parts, aligned,
                                                    own);
  }
}

template <typename Out>
cudaError_t run(const RowDequantizeArgs& args, cudaStream_t stream) {
  const RowLanes lanes(args.width);
  const int64_t rows = kThreads >> lanes.log_lanes, blocks = (args.rows + rows - 1) / rows;
  const int64_t bytes = args.width * static_cast<int64_t>(sizeof(Out));
  const bool aligned = is_aligned(args.out, kVectorBytes) && bytes % kVectorBytes == 0;
  return launch(row_dequantize_kernel<Out>, blocks, kThreads, 0, stream, args, lanes.log_lanes,
                lanes.parts, aligned);
}

}  // namespace

cudaError_t row_dequantize(const RowDequantizeArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  return dispatch(args.out_dtype, [&](auto out) { return run<decltype(out)>(args, stream); });
}

}  // namespace dct::cuda
