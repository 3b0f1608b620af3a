// row_dequantize.cu -- rows from codes of few bits.
//
// A row is read by 4, 8, 16 or 32 lanes, 40 columns per lane at a time: codes are unpacked to
// shared memory, one per byte, and written to the output by vectors. Rows have no alignment, so
// loads are of single bytes, but several are in flight: with one at a time, int8 was a quarter
// slower than a copy (measured on an H100; a tenth since).
#include "detail/device.cuh"
#include "detail/row_codes.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

struct Policy {
  static constexpr int kVectorBytes = 16;
  static constexpr int kColumns = 40;  // per lane: whole bytes of every format, whole vectors
  static constexpr int kBusyColumns =
      16;  // per lane: more lanes if a row has more columns than these
  static constexpr int kBytesInFlight = 8;  // loads of a lane before the first is used
};

struct Shared {
  alignas(16) uint8_t codes[kThreads * Policy::kColumns];
};

// Dequantizes the row at `in`; stores nothing if inactive. By a group of lanes.
template <RowFormat kFormat, typename Out>
__device__ void dequantize_row(const uint8_t* in, Out* out, int64_t width, bool active, int lanes,
                               bool aligned, uint8_t* codes) {
  constexpr int kElementsPerVector = Policy::kVectorBytes / sizeof(Out);
  constexpr int kCodesPerByte = codes_per_byte(kFormat);
  constexpr int kBytesInFlight =
      kCodesPerByte <= 2 ? Policy::kBytesInFlight : Policy::kBytesInFlight / 2;
  const int lane = thread_index() % lanes, most = lanes * Policy::kColumns;
  const int64_t bytes = code_bytes(width, kFormat);
  const float scale = to_float(BFloat16{static_cast<uint16_t>(in[bytes] | in[bytes + 1] << 8)});
  for (int64_t begin = 0; begin < width; begin += most) {
    const int columns = width - begin < most ? static_cast<int>(width - begin) : most;
    // Rounded up to whole vectors, so that the last vector reads only what was written: zeros past
    // the row.
    const int padded = (columns + kElementsPerVector - 1) / kElementsPerVector * kElementsPerVector;
    for (int first = lane; first * kCodesPerByte < padded; first += lanes * kBytesInFlight) {
      uint8_t read[kBytesInFlight];
#pragma unroll
      for (int j = 0; j < kBytesInFlight; ++j) {
        const int i = first + j * lanes;
        read[j] = i * kCodesPerByte < columns ? in[begin / kCodesPerByte + i] : 0;
      }
#pragma unroll
      for (int j = 0; j < kBytesInFlight; ++j) {
        const int i = first + j * lanes;
        if (i * kCodesPerByte >= padded) break;
        unpack_byte<kFormat>(read[j], [&](int k, uint32_t code) {
          codes[i * kCodesPerByte + k] = static_cast<uint8_t>(code);
        });
      }
    }
    __syncwarp();
    for (int c = lane * kElementsPerVector; active && c < columns;
         c += lanes * kElementsPerVector) {
      Out values[kElementsPerVector];
#pragma unroll
      for (int e = 0; e < kElementsPerVector; e += 4) {
        const uint32_t word = *reinterpret_cast<const uint32_t*>(codes + c + e);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto code = static_cast<int8_t>(word >> 8 * i);
          values[e + i] = round_to<Out>(__fmul_rn(static_cast<float>(code), scale));
        }
      }
      if (aligned) {
        stream_out(out + begin + c, values);
        continue;
      }
#pragma unroll
      for (int e = 0; e < kElementsPerVector; ++e) {
        if (c + e < columns) out[begin + c + e] = values[e];
      }
    }
    __syncwarp();
  }
}

template <typename Out>
__global__ void __launch_bounds__(kThreads)
    row_dequantize_kernel(RowDequantizeArgs args, int lanes, bool aligned) {
  __shared__ Shared shared;
  const int group = thread_index() / lanes;
  const int64_t index = int64_t{blockIdx.x} * (kThreads / lanes) + group;
  // All lanes of a warp take part: those past the last row load the first.
  const bool active = index < args.rows;
  const int64_t row = active ? index : 0, width = args.width;
  const uint8_t* in = args.quantized + row * row_bytes(width, args.format);
  Out* out = static_cast<Out*>(args.out) + row * width;
  uint8_t* codes = shared.codes + group * lanes * Policy::kColumns;
  switch (args.format) {
    case RowFormat::kInt8:
      return dequantize_row<RowFormat::kInt8>(in, out, width, active, lanes, aligned, codes);
    case RowFormat::kInt4:
      return dequantize_row<RowFormat::kInt4>(in, out, width, active, lanes, aligned, codes);
    case RowFormat::kTernary:
      return dequantize_row<RowFormat::kTernary>(in, out, width, active, lanes, aligned, codes);
    default:
      return dequantize_row<RowFormat::kSign>(in, out, width, active, lanes, aligned, codes);
  }
}

template <typename Out>
cudaError_t run(const RowDequantizeArgs& args, cudaStream_t stream) {
  int lanes = 4;
  while (lanes < kWarpSize && lanes * Policy::kBusyColumns < args.width) lanes *= 2;
  const int64_t rows = kThreads / lanes, blocks = (args.rows + rows - 1) / rows;
  const int64_t bytes = args.width * static_cast<int64_t>(sizeof(Out));
  const bool aligned =
      is_aligned(args.out, Policy::kVectorBytes) && bytes % Policy::kVectorBytes == 0;
  return launch(row_dequantize_kernel<Out>, blocks, kThreads, 0, stream, args, lanes, aligned);
}

}  // namespace

cudaError_t row_dequantize(const RowDequantizeArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  return dispatch(args.out_dtype, [&](auto out) { return run<decltype(out)>(args, stream); });
}

}  // namespace dct::cuda
