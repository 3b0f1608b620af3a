// row_quantize.cu -- rows to codes of few bits.
//
// A narrow row is held in registers by 4, 8, 16 or 32 lanes. Its codes are staged in shared memory,
// one per byte, packed there, and copied out by vectors for the whole block, since rows have no
// alignment. A wide row is read in several passes by a block, all but the first from the cache.
#include "detail/device.cuh"
#include "detail/row_codes.cuh"
#include "detail/row_quantize_wide.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

struct Policy {
  // Blocks per multiprocessor: 64 registers are enough for 16 columns per lane, not for 32.
  static constexpr int min_blocks(int columns) { return columns <= 16 ? 4 : 2; }
  static constexpr int kVectorBytes = 16;
};

template <typename T, int kLanes, int kVectors>
struct Shape {
  static constexpr int kElementsPerVector = Policy::kVectorBytes / sizeof(T);
  static constexpr int kRows = kThreads / kLanes;
  static constexpr int kColumns = kLanes * kVectors * kElementsPerVector;
  static_assert(kColumns <= kUnitsInWord, "sums fit 32 bits");

  struct Shared {
    alignas(16) uint8_t codes[kRows][kColumns];
    alignas(16) uint8_t out[kRows * (kColumns + kScaleBytes) + Policy::kVectorBytes];
  };
};

// Zero past the width. All loads are issued before the first value is used.
template <typename T, int kLanes, int kVectors, int kElementsPerVector>
__device__ void load_row(const T* row, int width, int lane, bool aligned,
                         float (&x)[kVectors][kElementsPerVector]) {
  T loaded[kVectors][kElementsPerVector] = {};
  const auto column = [lane](int j) { return (j * kLanes + lane) * kElementsPerVector; };
  if (aligned) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (column(j) < width) stream_in(row + column(j), loaded[j]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int e = 0; e < kElementsPerVector; ++e) {
        if (column(j) + e < width) loaded[j][e] = row[column(j) + e];
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int e = 0; e < kElementsPerVector; ++e) x[j][e] = to_float(loaded[j][e]);
  }
}

// The mean magnitude of a row, in units; with kBound, of the magnitudes above `bound`.
template <int kLanes, bool kBound, int kVectors, int kElementsPerVector>
__device__ float mean_magnitude(const float (&x)[kVectors][kElementsPerVector], int width,
                                float inverse_unit, float bound) {
  uint32_t total = 0, kept = 0;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int e = 0; e < kElementsPerVector; ++e) {
      const float magnitude = fabsf(__fmul_rn(x[j][e], inverse_unit));
      const bool keep = !kBound || magnitude > bound;
      total += keep ? whole_units(magnitude) : 0;
      kept += keep;
    }
  }
  total = reduce<kLanes>(total, sum<uint32_t>);
  return mean_of(total,
                 kBound ? reduce<kLanes>(kept, sum<uint32_t>) : static_cast<uint32_t>(width));
}

// Quantizes a row: its codes and scale, packed into `out`. By a group of lanes.
template <RowFormat kFormat, int kLanes, int kVectors, int kElementsPerVector>
__device__ void quantize_row(const float (&x)[kVectors][kElementsPerVector], int width, int lane,
                             uint8_t* codes, uint8_t* out) {
  int top = 0;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int e = 0; e < kElementsPerVector; ++e) top = larger(top, magnitude_bits(x[j][e]));
  }
  top = reduce<kLanes>(top, larger);
  float mean = 0.0f, bound = 0.0f;
  const float inverse_unit = units_of(top).inverse_unit;
  if constexpr (kFormat == RowFormat::kTernary || kFormat == RowFormat::kSign) {
    mean = mean_magnitude<kLanes, false>(x, width, inverse_unit, 0.0f);
  }
  if constexpr (kFormat == RowFormat::kTernary) {
    bound = __fmul_rn(0.75f, mean);
    mean = mean_magnitude<kLanes, true>(x, width, inverse_unit, bound);
  }
  const RowQuantizer quantizer(kFormat, top, mean, bound);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int e = 0; e < kElementsPerVector; e += 4) {
      uint32_t word = 0;
#pragma unroll
      for (int i = 3; i >= 0; --i) word = word << 8 | quantizer.code<kFormat>(x[j][e + i]);
      const int column = (j * kLanes + lane) * kElementsPerVector + e;
      *reinterpret_cast<uint32_t*>(codes + column) = quantizer.usable ? word : 0;
    }
  }
  __syncwarp();
  const int bytes = static_cast<int>(code_bytes(width, kFormat));
  constexpr int kCodesPerByte = codes_per_byte(kFormat);
  for (int i = lane; i < bytes; i += kLanes) {
    out[i] = pack_byte<kFormat>([&](int k) -> uint32_t {
      // Only 5 codes per byte do not divide the padded columns.
      return kCodesPerByte != 5 || i * kCodesPerByte + k < width ? codes[i * kCodesPerByte + k] : 0;
    });
  }
  if (lane == 0) {
    out[bytes] = static_cast<uint8_t>(quantizer.scale.bits);
    out[bytes + 1] = static_cast<uint8_t>(quantizer.scale.bits >> 8);
  }
}

// Copies bytes from shared to global memory; both must have the same alignment modulo 16. By a
// block.
__device__ void store_bytes(uint8_t* target, const uint8_t* shared, int count) {
  const int skip = static_cast<int>(reinterpret_cast<uintptr_t>(target) % 16);
  for (int i = thread_index() * 16; i < skip + count; i += kThreads * 16) {
    if (i >= skip && i + 16 <= skip + count) {
      __stcs(reinterpret_cast<uint4*>(target + (i - skip)),
             *reinterpret_cast<const uint4*>(shared + i));
      continue;
    }
    for (int k = i > skip ? i : skip; k < i + 16 && k < skip + count; ++k) {
      target[k - skip] = shared[k];
    }
  }
}

template <typename T, int kLanes, int kVectors>
__global__ void __launch_bounds__(kThreads, Policy::min_blocks(kVectors * 16 / sizeof(T)))
    row_quantize_narrow_kernel(RowQuantizeArgs args, bool aligned) {
  using Shape = Shape<T, kLanes, kVectors>;
  __shared__ typename Shape::Shared shared;
  const int width = static_cast<int>(args.width);
  const int bytes = static_cast<int>(row_bytes(width, args.format));
  const int lane = thread_index() % kLanes, group = thread_index() / kLanes;
  const int64_t first = int64_t{blockIdx.x} * Shape::kRows;
  const int64_t left = args.rows - first;
  const int rows = left < Shape::kRows ? static_cast<int>(left) : Shape::kRows;
  const bool active = group < rows;

  float x[kVectors][Shape::kElementsPerVector];
  const T* row = static_cast<const T*>(args.x) + (first + (active ? group : 0)) * width;
  load_row<T, kLanes>(row, active ? width : 0, lane, aligned, x);
  uint8_t* target = args.out + first * bytes;
  const int skip = static_cast<int>(reinterpret_cast<uintptr_t>(target) % 16);
  uint8_t* codes = shared.codes[group];
  uint8_t* out = shared.out + skip + group * bytes;
  switch (args.format) {
    case RowFormat::kInt8:
      quantize_row<RowFormat::kInt8, kLanes>(x, width, lane, codes, out);
      break;
    case RowFormat::kInt4:
      quantize_row<RowFormat::kInt4, kLanes>(x, width, lane, codes, out);
      break;
    case RowFormat::kTernary:
      quantize_row<RowFormat::kTernary, kLanes>(x, width, lane, codes, out);
      break;
    default:
      quantize_row<RowFormat::kSign, kLanes>(x, width, lane, codes, out);
  }
  __syncthreads();
  store_bytes(target, shared.out, rows * bytes);
}

template <typename T, int kLanes, int kVectors>
cudaError_t run_narrow(const RowQuantizeArgs& args, cudaStream_t stream) {
  using Shape = Shape<T, kLanes, kVectors>;
  const int64_t blocks = (args.rows + Shape::kRows - 1) / Shape::kRows;
  const bool aligned =
      is_aligned(args.x, Policy::kVectorBytes) && args.width % Shape::kElementsPerVector == 0;
  return launch(row_quantize_narrow_kernel<T, kLanes, kVectors>, blocks, kThreads, 0, stream, args,
                aligned);
}

template <typename T>
cudaError_t run(const RowQuantizeArgs& args, cudaStream_t stream) {
  constexpr int kVectors = sizeof(T);  // 16 columns per lane
  if (args.width <= 64) return run_narrow<T, 4, kVectors>(args, stream);
  if (args.width <= 128) return run_narrow<T, 8, kVectors>(args, stream);
  if (args.width <= 256) return run_narrow<T, 16, kVectors>(args, stream);
  if (args.width <= 512) return run_narrow<T, 32, kVectors>(args, stream);
  if (args.width <= 1024) return run_narrow<T, 32, 2 * kVectors>(args, stream);
  return launch(row_quantize_wide_kernel, args.rows, kThreads, 0, stream, args);
}

}  // namespace

cudaError_t row_quantize(const RowQuantizeArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  return dispatch(args.x_dtype, [&](auto x) { return run<decltype(x)>(args, stream); });
}

}  // namespace dct::cuda
