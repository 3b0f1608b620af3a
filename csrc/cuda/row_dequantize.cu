// row_dequantize.cu -- dequantizes rows.
//
// 2 to 32 lanes decode a row. Rows are not aligned, but the rows of a warp are contiguous. So the
// warp copies their bytes to shared memory by vectors of 16 bytes. From there a lane reads the
// codes of one output vector, at any byte offset.
#include "detail/device.cuh"
#include "detail/row_codes.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

struct Policy {
  static constexpr int kVectorBytes = 16;
  static constexpr int kBusyColumns = 32;  // per lane: wider rows have more lanes
  static constexpr int kColumns = 40;      // per lane at a time: whole bytes of every format
  static constexpr int kWarpColumns = kWarpSize * kColumns;
};

constexpr int kOverread = 7;    // bytes that four_bytes() reads past the first
constexpr int kStagedVectors =  // including the bytes around the rows in the first and last vector
    (Policy::kWarpColumns + kScaleBytes + kOverread) / Policy::kVectorBytes + 2;

struct WarpShared {
  uint4 bytes[kStagedVectors];
  uint32_t trits[Policy::kWarpColumns / 4];
};

// Copies `count` bytes of the tensor, from `from` on, to shared memory. Returns where they begin.
// Also copies the bytes that share vectors with them, or zeros outside the tensor. By one warp.
__device__ int stage_bytes(const uint8_t* tensor, int64_t tensor_bytes, int64_t from, int count,
                           uint4* staged) {
  constexpr int kBytes = sizeof(uint4), kInFlight = (kStagedVectors + kWarpSize - 1) / kWarpSize;
  const int skip = static_cast<int>(reinterpret_cast<uintptr_t>(tensor + from) % kBytes);
  const int vectors = (skip + count + kOverread) / kBytes + 1;
  const uint8_t* source = tensor + (from - skip);
  // Vectors [begin, end) are inside the tensor.
  const int begin = from < skip ? 1 : 0;
  const int end = static_cast<int>(min((tensor_bytes - from + skip) / kBytes, int64_t{vectors}));
  uint4 read[kInFlight];
#pragma unroll
  for (int j = 0; j < kInFlight; ++j) {
    const int v = j * kWarpSize + lane_index();
    if (v >= begin && v < end) read[j] = __ldcs(reinterpret_cast<const uint4*>(source) + v);
  }
#pragma unroll
  for (int j = 0; j < kInFlight; ++j) {
    const int v = j * kWarpSize + lane_index();
    if (v >= begin && v < end) staged[v] = read[j];
  }
  if (begin > 0 || end < vectors) {
    const int64_t length = tensor_bytes - from + skip;
    for (int i = lane_index(); i < vectors * kBytes; i += kWarpSize) {
      if (i >= begin * kBytes && i < end * kBytes) continue;
      reinterpret_cast<uint8_t*>(staged)[i] = i >= skip && i < length ? source[i] : 0;
    }
  }
  __syncwarp();
  return skip;
}

// Dequantizes a warp's rows [first, first + rows), each by 2^log_lanes lanes and in `parts` parts.
template <RowFormat kFormat, typename Out>
__device__ void dequantize_rows(const RowDequantizeArgs& args, int64_t first, int rows,
                                int log_lanes, int64_t parts, bool aligned, WarpShared& shared) {
  constexpr int kElements = Policy::kVectorBytes / sizeof(Out);
  constexpr int kCodesPerByte = codes_per_byte(kFormat);
  const int lanes = 1 << log_lanes;
  const int lane = lane_index() & (lanes - 1), group = lane_index() >> log_lanes;
  const bool active = group < rows;  // the other lanes only copy
  const int64_t width = args.width, bytes = row_bytes(width, kFormat);
  Out* out = static_cast<Out*>(args.out) + (first + group) * width;
  const int most = lanes * Policy::kColumns,
            most_bytes = lanes * (Policy::kColumns / kCodesPerByte);
  const UnitFloats unit_float;
  float scale = 0.0f;
  // The last part of a wide row comes first, because the scale follows it.
  for (int64_t part = parts - 1; part >= 0; --part) {
    const int64_t begin = part * most, left = width - begin, skipped = part * most_bytes;
    const bool last = part == parts - 1;
    const int columns = left < most ? static_cast<int>(left) : most;
    const int count = last ? static_cast<int>(rows * bytes - skipped) : most_bytes;
    const int staged = stage_bytes(args.quantized, args.rows * bytes, first * bytes + skipped,
                                   count, shared.bytes);
    const auto* staged_bytes = reinterpret_cast<const uint8_t*>(shared.bytes);
    int row = staged + (active ? group * static_cast<int>(bytes) : 0);
    if (last) {
      const uint8_t* after = staged_bytes + row + (bytes - kScaleBytes - skipped);
      scale = to_float(BFloat16{static_cast<uint16_t>(after[0] | after[1] << 8)});
    }
    if constexpr (kFormat == RowFormat::kTernary) {
      auto* trits = reinterpret_cast<uint8_t*>(shared.trits) + group * most;
      const int whole = (columns + kElements - 1) / kElements * kElements;  // vectors
      for (int i = lane; i * kTrits < whole; i += lanes) {
        unpack_byte<kFormat>(staged_bytes[row + i],
                             [&](int k, uint32_t trit) { trits[i * kTrits + k] = trit; });
      }
      __syncwarp();
      row = group * most;
    }
    const auto* words = kFormat == RowFormat::kTernary
                            ? shared.trits
                            : reinterpret_cast<const uint32_t*>(shared.bytes);
    for (int c = lane * kElements; active && c < columns; c += lanes * kElements) {
      float codes[kElements];
      load_codes<kFormat>(words, row, c, unit_float, codes);
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
  __shared__ WarpShared shared[kWarps];
  const int64_t first = (int64_t{blockIdx.x} * kWarps + warp_index()) * (kWarpSize >> log_lanes);
  if (first >= args.rows) return;
  const auto rows = static_cast<int>(min(args.rows - first, int64_t{kWarpSize >> log_lanes}));
  WarpShared& own = shared[warp_index()];
  switch (args.format) {
    case RowFormat::kInt8:
      return dequantize_rows<RowFormat::kInt8, Out>(args, first, rows, log_lanes, parts, aligned,
                                                    own);
    case RowFormat::kInt4:
      return dequantize_rows<RowFormat::kInt4, Out>(args, first, rows, log_lanes, parts, aligned,
                                                    own);
    case RowFormat::kTernary:
      return dequantize_rows<RowFormat::kTernary, Out>(args, first, rows, log_lanes, parts, aligned,
                                                       own);
    default:
      return dequantize_rows<RowFormat::kSign, Out>(args, first, rows, log_lanes, parts, aligned,
                                                    own);
  }
}

template <typename Out>
cudaError_t run(const RowDequantizeArgs& args, cudaStream_t stream) {
  int log_lanes = 1;
  while (log_lanes < 5 && (Policy::kBusyColumns << log_lanes) < args.width) ++log_lanes;
  const int64_t rows = kThreads >> log_lanes, blocks = (args.rows + rows - 1) / rows;
  const int64_t bytes = args.width * static_cast<int64_t>(sizeof(Out));
  const int64_t most = Policy::kColumns << log_lanes, parts = (args.width - 1) / most + 1;
  const bool aligned =
      is_aligned(args.out, Policy::kVectorBytes) && bytes % Policy::kVectorBytes == 0;
  return launch(row_dequantize_kernel<Out>, blocks, kThreads, 0, stream, args, log_lanes, parts,
                aligned);
}

}  // namespace

cudaError_t row_dequantize(const RowDequantizeArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  return dispatch(args.out_dtype, [&](auto out) { return run<decltype(out)>(args, stream); });
}

}  // namespace dct::cuda
