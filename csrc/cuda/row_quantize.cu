// row_quantize.cu -- quantizes rows.
//
// 4 to 64 lanes hold a narrow row in registers. They pack its codes in shared memory. The block
// copies its rows out together, by vectors, because single rows are not aligned. A block reads a
// wide row in several passes. All except the first read from the cache, if the row fits into it.
#include "detail/device.cuh"
#include "detail/row_codes.cuh"
#include "detail/row_quantize_wide.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

struct RowQuantizePolicy {
  // Columns per lane, and blocks per multiprocessor. Sign needs two reductions per row. For rows of
  // up to 1,024 columns it uses kManyColumns, because reductions over fewer lanes take fewer
  // instructions. int8 and int4 are bound by memory.
  static constexpr int kColumns = 16, kManyColumns = 32;
  static constexpr int min_blocks(int columns) { return columns == kColumns ? 4 : 2; }
};

template <typename T, int kLanes, int kLaneColumns>
struct NarrowShape {
  static constexpr int kElementsPerVector = kVectorBytes / sizeof(T);
  static constexpr int kVectors = kLaneColumns / kElementsPerVector;
  static constexpr int kRows = kThreads / kLanes;
  static constexpr int kColumns = kLanes * kLaneColumns;
  static_assert(kColumns <= kUnitsInWord, "sums fit 32 bits");

  struct Shared {
    alignas(16) uint8_t codes[kRows][kColumns];
    alignas(16) uint8_t out[kRows * (kColumns + kScaleBytes) + kVectorBytes];
    uint32_t halves[2][kWarps];  // partial reductions of a row that spans two warps
  };
};

// A row in the registers of kLanes lanes, which belong to one or two warps.
template <typename T, int kLanes, int kLaneColumns>
struct NarrowRow {
  using Shape = NarrowShape<T, kLanes, kLaneColumns>;
  static constexpr int kVectors = Shape::kVectors, kElements = Shape::kElementsPerVector;

  typename Shape::Shared& shared;
  int width;
  int lane = thread_index() % kLanes;
  float x[kVectors][kElements] = {};

  __device__ int column(int vector) const { return (vector * kLanes + lane) * kElements; }

  // Loads zeros past the width. Issues all loads before the first value is used.
  __device__ void load(const T* row, bool aligned) {
    T loaded[kVectors][kElements] = {};
    if (aligned) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (column(v) < width) stream_in(row + column(v), loaded[v]);
      }
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          if (column(v) + e < width) loaded[v][e] = row[column(v) + e];
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) x[v][e] = to_float(loaded[v][e]);
    }
  }

  // Reduces over the row. Each reduction that a thread takes part in has its own index.
  template <typename Value, typename Operation>
  __device__ Value reduced(int index, Value value, Operation operation) {
    value = reduce<(kLanes < kWarpSize ? kLanes : kWarpSize)>(value, operation);
    if constexpr (kLanes > kWarpSize) {
      static_assert(kLanes == 2 * kWarpSize);
      const int warp = warp_index();
      if (lane_index() == 0) shared.halves[index][warp] = static_cast<uint32_t>(value);
      __syncthreads();
      value = operation(value, static_cast<Value>(shared.halves[index][warp ^ 1]));
    }
    return value;
  }

  // The mean magnitude in units.
  __device__ float mean_magnitude(float inverse_unit) {
    uint32_t total = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        total += unit_bits(fabsf(__fmul_rn(x[v][e], inverse_unit)));
      }
    }
    total =
        reduced(1, total, sum<uint32_t>) - static_cast<uint32_t>(Shape::kColumns) * kUnitBitsOfZero;
    return mean_of(total, static_cast<uint32_t>(width));
  }

  // Quantizes the row and packs its codes and scale into `out`.
  template <RowFormat kFormat>
  __device__ void quantize(uint8_t* out) {
    int top = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) top = larger(top, magnitude_bits(x[v][e]));
    }
    top = reduced(0, top, larger);
    float mean = 0.0f;
    if constexpr (kFormat == RowFormat::kSign) mean = mean_magnitude(units_of(top).inverse_unit);
    const RowQuantizer quantizer(kFormat, top, mean);
    if (!quantizer.usable) memset(x, 0, sizeof(x));
    if constexpr (kFormat == RowFormat::kSign) {
      stage_signs(quantizer, out);
    } else {
      store_codes<kFormat>(quantizer, out);
    }
    if (lane < kScaleBytes) {
      out[code_bytes(width, kFormat) + lane] =
          static_cast<uint8_t>(quantizer.scale.bits >> 8 * lane);
    }
  }

  template <RowFormat kFormat>
  __device__ void store_codes(const RowQuantizer& quantizer, uint8_t* out) const {
    constexpr int kCodes = codes_per_byte(kFormat);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      uint8_t* const bytes = out + column(v) / kCodes;
      const int left = width - column(v);
#pragma unroll
      for (int e = 0; e < kElements; e += kCodes) {
        if (e >= left) break;
        bytes[e / kCodes] = pack_byte<kFormat>(
            [&](int k) -> uint32_t { return quantizer.code<kFormat>(x[v][e + k]); });
      }
    }
  }

  // Eight signs share a byte but may come from several lanes, so the signs are staged.
  __device__ void stage_signs(const RowQuantizer& quantizer, uint8_t* out) {
    uint32_t* words = reinterpret_cast<uint32_t*>(shared.codes[thread_index() / kLanes]);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < kElements; e += 4) {
        uint32_t word = 0;
#pragma unroll
        for (int i = 3; i >= 0; --i)
          word = word << 8 | quantizer.code<RowFormat::kSign>(x[v][e + i]);
        words[(column(v) + e) / 4] = word;
      }
    }
    if constexpr (kLanes > kWarpSize) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    const int bytes = static_cast<int>(code_bytes(width, RowFormat::kSign));
    constexpr uint32_t kBits = 1 << 24 | 2 << 16 | 4 << 8 | 8;  // moves 4 bits to the top byte
    for (int i = lane; i < bytes; i += kLanes) {
      out[i] =
          static_cast<uint8_t>(words[2 * i] * kBits >> 24 | words[2 * i + 1] * kBits >> 24 << 4);
    }
  }
};

// Copies `count` bytes from shared to global memory. `shared` is aligned to 16 bytes, and the bytes
// begin at shared[target % 16], so vectors are aligned in both memories. By a block.
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

template <typename T, int kLanes, int kLaneColumns>
__global__ void __launch_bounds__(kThreads, RowQuantizePolicy::min_blocks(kLaneColumns))
    row_quantize_narrow_kernel(RowQuantizeArgs args, bool aligned) {
  using Shape = NarrowShape<T, kLanes, kLaneColumns>;
  __shared__ typename Shape::Shared shared;
  const int width = static_cast<int>(args.width);
  const int bytes = static_cast<int>(row_bytes(width, args.format));
  const int group = thread_index() / kLanes;
  const int64_t first = int64_t{blockIdx.x} * Shape::kRows;
  const int64_t left = args.rows - first;
  const int rows = left < Shape::kRows ? static_cast<int>(left) : Shape::kRows;

  // Lanes past the last row get an empty row, because all lanes take part in the reductions.
  NarrowRow<T, kLanes, kLaneColumns> row = {shared, group < rows ? width : 0};
  row.load(static_cast<const T*>(args.x) + (first + group) * width, aligned);
  row.width = width;
  uint8_t* target = args.out + first * bytes;
  const int skip = static_cast<int>(reinterpret_cast<uintptr_t>(target) % 16);
  uint8_t* out = shared.out + skip + group * bytes;
  switch (args.format) {
    case RowFormat::kInt8:
      row.template quantize<RowFormat::kInt8>(out);
      break;
    case RowFormat::kInt4:
      row.template quantize<RowFormat::kInt4>(out);
      break;
    default:
      row.template quantize<RowFormat::kSign>(out);
  }
  __syncthreads();
  store_bytes(target, shared.out, rows * bytes);
}

template <typename T, int kLanes, int kLaneColumns = RowQuantizePolicy::kColumns>
cudaError_t run_narrow(const RowQuantizeArgs& args, cudaStream_t stream) {
  using Shape = NarrowShape<T, kLanes, kLaneColumns>;
  const int64_t blocks = (args.rows + Shape::kRows - 1) / Shape::kRows;
  const bool aligned =
      is_aligned(args.x, kVectorBytes) && args.width % Shape::kElementsPerVector == 0;
  return launch(row_quantize_narrow_kernel<T, kLanes, kLaneColumns>, blocks, kThreads, 0, stream,
                args, aligned);
}

template <typename T>
cudaError_t run(const RowQuantizeArgs& args, cudaStream_t stream) {
  if (args.width <= 64) return run_narrow<T, 4>(args, stream);
  if (args.width <= 128) return run_narrow<T, 8>(args, stream);
  if (args.width <= 256) return run_narrow<T, 16>(args, stream);
  if (args.width <= 512) return run_narrow<T, 32>(args, stream);
  if (args.width <= 1024) {
    const bool integers = args.format == RowFormat::kInt8 || args.format == RowFormat::kInt4;
    return integers ? run_narrow<T, 64>(args, stream)
                    : run_narrow<T, 32, RowQuantizePolicy::kManyColumns>(args, stream);
  }
  return launch(row_quantize_wide_kernel, args.rows, kThreads, 0, stream, args);
}

}  // namespace

cudaError_t row_quantize(const RowQuantizeArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  return dispatch(args.x_dtype, [&](auto x) { return run<decltype(x)>(args, stream); });
}

}  // namespace dct::cuda
