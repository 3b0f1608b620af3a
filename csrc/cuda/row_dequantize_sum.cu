// row_dequantize_sum.cu -- sums the quantized rows of all ranks. A warp keeps the sums of a part of
// its rows in registers while it adds rank after rank. So every message is read once, and the
// output is written once.
#include "detail/staged_rows.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

constexpr int kCodes = 8;      // adjacent codes that a lane reads together
constexpr int kOverread = 11;  // bytes that load_codes() reads past the first of 8 codes
constexpr int kLaneGroups = kLaneColumns / kCodes;

template <RowFormat kFormat>
using Staged = StagedBytes<kStagedVectors<kFormat, kOverread>, kOverread>;

// Number of ranks from which a warp loads bytes before it uses the bytes of the first.
template <RowFormat kFormat>
constexpr int kInFlight = Staged<kFormat>::kLoads == 1 ? 4 : 2;

template <RowFormat kFormat>
using WarpBytes = uint4[kStagedVectors<kFormat, kOverread>];

// Adds codes times their scale. A product is exact unless it overflows, so a fused multiply-add
// rounds like a separate product and sum.
__device__ inline void add(const float (&codes)[kCodes], float scale, float (&sums)[kCodes]) {
  if (fabsf(scale) < kNeverOverflows) {
#pragma unroll
    for (int e = 0; e < kCodes; ++e) sums[e] = __fmaf_rn(codes[e], scale, sums[e]);
    return;
  }
#pragma unroll
  for (int e = 0; e < kCodes; ++e) sums[e] = __fadd_rn(sums[e], __fmul_rn(codes[e], scale));
}

// Writes a lane's 8 sums to `out`. `left` is the number of columns from `out` to the end of the
// row: negative past the end, and at most -8 if the lane before has no columns either. For float
// output, an even lane and the next lane exchange half of their sums, so that the vectors which
// they store together are contiguous. By one warp.
template <typename Out>
__device__ void write(const float (&sums)[kCodes], Out* out, int left, bool aligned) {
  if (!aligned) {
#pragma unroll
    for (int e = 0; e < kCodes; ++e) {
      if (e < left) out[e] = round_result<Out>(sums[e]);
    }
    return;
  }
  if constexpr (sizeof(Out) == sizeof(float)) {
    const bool odd = lane_index() % 2 != 0;
    float first[kVectorElements], second[kVectorElements];
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      const float low = round_result<float>(sums[e]);
      const float high = round_result<float>(sums[kVectorElements + e]);
      const float other = __shfl_xor_sync(kFullWarp, odd ? low : high, 1);
      first[e] = odd ? other : low;
      second[e] = odd ? high : other;
    }
    const int back = odd ? kVectorElements : 0;  // from `first` to this lane's columns
    if (left + back > 0) stream_out(out - back, first);
    if (left + back > kCodes) stream_out(out - back + kCodes, second);
  } else {
    Out values[kCodes];
#pragma unroll
    for (int e = 0; e < kCodes; ++e) values[e] = round_result<Out>(sums[e]);
    if (left > 0) stream_out(out, values);
  }
}

template <RowFormat kFormat, typename Out>
__global__ void __launch_bounds__(kThreads, 2)
    row_dequantize_sum_kernel(RowDequantizeSumArgs args, RowLanes of_row, bool aligned) {
  __shared__ WarpBytes<kFormat> all_shared[kWarps];
  WarpBytes<kFormat>& shared = all_shared[warp_index()];
  const int log_lanes = of_row.log_lanes, lanes = 1 << log_lanes;
  const int64_t first = (int64_t{blockIdx.x} * kWarps + warp_index()) * (kWarpSize >> log_lanes);
  if (first >= args.rows) return;
  const auto rows = static_cast<int>(min(args.rows - first, int64_t{kWarpSize >> log_lanes}));
  const int lane = lane_index() & (lanes - 1), group = lane_index() >> log_lanes;
  const bool active = group < rows;  // other lanes only copy bytes
  const int64_t width = args.width, bytes = row_bytes(width, kFormat);
  const int64_t message_bytes = args.rows * bytes, all_bytes = args.ranks * message_bytes;
  const int ranks = static_cast<int>(args.ranks), most = lanes * kLaneColumns;
  const int most_bytes = lanes * (kLaneColumns / codes_per_byte(kFormat));
  const UnitFloats unit_float;
  for (int64_t part = 0; part < of_row.parts; ++part) {
    const int64_t begin = part * most, left = width - begin, skipped = part * most_bytes;
    const bool last = part == of_row.parts - 1;
    const int columns = left < most ? static_cast<int>(left) : most;
    const int count = last ? static_cast<int>(rows * bytes - skipped) : most_bytes;
    float sums[kLaneGroups][kCodes];
#pragma unroll
    for (auto& some : sums) {
#pragma unroll
      for (float& sum : some) sum = -0.0f;  // adding a value to -0.0 returns that value
    }
    Span span = {args.quantized, all_bytes, first * bytes + skipped, count};
    // Some vectors may be partly outside the message, and so outside the tensor.
    const bool at_edge =
        span.from < kVectorBytes || message_bytes - span.from < count + 2 * kVectorBytes;
#pragma unroll 1
    for (int p = 0; p < ranks; p += kInFlight<kFormat>) {
      Staged<kFormat> loaded[kInFlight<kFormat>];
      float scales[kInFlight<kFormat>];  // if the loaded bytes do not contain them
      const int64_t from = span.from;
#pragma unroll
      for (int k = 0; k < kInFlight<kFormat>; ++k, span.from += message_bytes) {
        if (p + k >= ranks) continue;
        loaded[k].load(span, at_edge);
        if (!last) scales[k] = scale_at(span.tensor + span.from - skipped + bytes - kScaleBytes);
      }
      span.from = from;
#pragma unroll
      for (int k = 0; k < kInFlight<kFormat>; ++k, span.from += message_bytes) {
        if (p + k >= ranks) continue;
        const int staged = loaded[k].store(span, at_edge, shared);
        const auto* staged_bytes = reinterpret_cast<const uint8_t*>(shared);
        const int row = staged + (active ? group * static_cast<int>(bytes) : 0);
        const float scale =
            last ? scale_at(staged_bytes + row + (bytes - kScaleBytes - skipped)) : scales[k];
        const auto* words = reinterpret_cast<const uint32_t*>(shared);
#pragma unroll
        for (int g = 0; g < kLaneGroups; ++g) {
          const int column = (g * lanes + lane) * kCodes;
          if (column >= columns) break;
          float codes[kCodes];
          load_codes<kFormat>(words, row, column, unit_float, codes);
          add(codes, scale, sums[g]);
        }
        __syncwarp();
      }
    }
    Out* out = static_cast<Out*>(args.out) + (first + group) * width + begin;
#pragma unroll
    for (int g = 0; g < kLaneGroups; ++g) {
      const int column = (g * lanes + lane) * kCodes;
      write(sums[g], out + column, active ? columns - column : -kCodes, aligned);
    }
  }
}

}  // namespace

cudaError_t row_dequantize_sum(const RowDequantizeSumArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const RowLanes lanes(args.width);
  const int64_t rows = kThreads >> lanes.log_lanes, blocks = (args.rows + rows - 1) / rows;
  const int64_t bytes = args.width * itemsize(args.out_dtype);
  const bool aligned = is_aligned(args.out, kVectorBytes) && bytes % kVectorBytes == 0;
  return dispatch(args.out_dtype, [&](auto out) {
    return dispatch(args.format, [&](auto format) {
      constexpr RowFormat kFormat = decltype(format)::value;
      return launch(row_dequantize_sum_kernel<kFormat, decltype(out)>, blocks, kThreads, 0, stream,
                    args, lanes, aligned);
    });
  });
}

}  // namespace dct::cuda
