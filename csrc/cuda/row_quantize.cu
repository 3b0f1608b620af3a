// row_quantize.cu -- quantizes rows.
//
// Lanes hold a row of up to 8,192 columns in registers: two lanes, part of a warp, or up to eight
// warps. They pack its codes in shared memory. The block copies its rows out together, by vectors,
// because single rows are not aligned. detail/row_quantize_wide.cuh handles wider rows.
#include "detail/row_codes.cuh"
#include "detail/row_quantize_wide.cuh"
#include "detail/scan.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

struct RowQuantizePolicy {
  // Columns per lane, and blocks per multiprocessor. More columns per lane take fewer instructions
  // per column, but a load of a warp then touches more rows, which matters if rows are narrow.
  static constexpr int kFewColumns = 8, kColumns = 16, kManyColumns = 32;
  static constexpr int min_blocks(int columns, int threads) {
    return (columns <= kColumns ? 4 : 3) * kThreads / threads;
  }
};

template <typename T, int kLanes, int kLaneColumns>
struct NarrowShape {
  static constexpr int kElementsPerVector = kVectorBytes / sizeof(T);
  static constexpr int kVectors = kLaneColumns / kElementsPerVector;
  static constexpr int kBlockThreads = kRowThreads<kLanes>, kRows = kBlockThreads / kLanes;
  static constexpr int kColumns = kLanes * kLaneColumns;
  static constexpr int kWarpLanes = kLanes < kWarpSize ? kLanes : kWarpSize;  // of a row in a warp
  static constexpr int kRowWarps = kLanes / kWarpLanes;
  static_assert(kWarpLanes * kLaneColumns <= kUnitsInWord, "sums of a warp fit 32 bits");
  using Total = std::conditional_t<(kColumns > kUnitsInWord), Word, uint32_t>;

  struct Shared {
    alignas(16) uint8_t out[kRows * (kColumns + kScaleBytes) + kVectorBytes];
    Total partials[2][kWarps];  // for the two reductions of a row
  };
};

// A row in the registers of kLanes lanes.
template <typename T, int kLanes, int kLaneColumns>
struct NarrowRow {
  using Shape = NarrowShape<T, kLanes, kLaneColumns>;
  using Total = typename Shape::Total;
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
    total = reduce<Shape::kWarpLanes>(total, sum<uint32_t>) -
            uint32_t{Shape::kWarpLanes * kLaneColumns} * kUnitBitsOfZero;
    return mean_of(reduce_warps<Shape::kRowWarps>(Total{total}, sum<Total>, shared.partials[1]),
                   static_cast<Total>(width));
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
    const auto warp_top = static_cast<Total>(reduce<Shape::kWarpLanes>(top, larger<int>));
    top = static_cast<int>(
        reduce_warps<Shape::kRowWarps>(warp_top, larger<Total>, shared.partials[0]));
    float mean = 0.0f;
    if constexpr (kFormat == RowFormat::kSign) mean = mean_magnitude(units_of(top).inverse_unit);
    const RowQuantizer quantizer(kFormat, top, mean);
    if constexpr (kFormat == RowFormat::kSign) {
      store_signs(quantizer.usable, out);
    } else {
      if (!quantizer.usable) memset(x, 0, sizeof(x));
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

  // Eight signs share a byte. If a vector has only four, a pair of lanes exchanges signs. Then the
  // even lane stores the bytes of the even vectors, and the odd lane those of the odd vectors.
  __device__ void store_signs(bool usable, uint8_t* out) const {
    uint32_t signs = 0;  // bit v * kElements + e; a zero of either sign is positive
#pragma unroll
    for (int v = kVectors - 1; v >= 0; --v) {
#pragma unroll
      for (int e = kElements - 1; e >= 0; --e) {
        signs = __funnelshift_l(float_to_bits(__fadd_rn(x[v][e], 0.0f)), signs, 1);
      }
    }
    if (!usable) signs = 0;
    const int odd = kElements < 8 ? lane % 2 : 0;
    if constexpr (kElements < 8) {
      constexpr uint32_t kHalves = 0x0f0f0f0f;
      const uint32_t other = __shfl_xor_sync(kFullWarp, signs, 1);
      signs = odd ? (other >> 4 & kHalves) | (signs & ~kHalves)
                  : (signs & kHalves) | (other & kHalves) << 4;
    }
#pragma unroll
    for (int v = 0; v < kVectors; v += 8 / kElements) {
      const int byte = column(v + odd) / 8;
      if (8 * byte < width) out[byte] = static_cast<uint8_t>(signs >> v * kElements);
    }
  }
};

// Copies `count` bytes from shared to global memory. `shared` is aligned to 16 bytes, and the bytes
// begin at shared[target % 16], so vectors are aligned in both memories. By a block.
template <int kBlockThreads>
__device__ void store_bytes(uint8_t* target, const uint8_t* shared, int count) {
  const int skip = static_cast<int>(reinterpret_cast<uintptr_t>(target) % 16);
  for (int i = thread_index() * 16; i < skip + count; i += kBlockThreads * 16) {
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
__global__ void __launch_bounds__(kRowThreads<kLanes>,
                                  RowQuantizePolicy::min_blocks(kLaneColumns, kRowThreads<kLanes>))
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
  store_bytes<Shape::kBlockThreads>(target, shared.out, rows * bytes);
}

template <typename T, int kLanes, int kLaneColumns = RowQuantizePolicy::kColumns>
cudaError_t run_narrow(const RowQuantizeArgs& args, cudaStream_t stream) {
  using Shape = NarrowShape<T, kLanes, kLaneColumns>;
  const int64_t blocks = (args.rows + Shape::kRows - 1) / Shape::kRows;
  const bool aligned =
      is_aligned(args.x, kVectorBytes) && args.width % Shape::kElementsPerVector == 0;
  return launch(row_quantize_narrow_kernel<T, kLanes, kLaneColumns>, blocks, Shape::kBlockThreads,
                0, stream, args, aligned);
}

template <typename T>
cudaError_t run(const RowQuantizeArgs& args, cudaStream_t stream) {
  using Policy = RowQuantizePolicy;
  if (args.width <= 16) return run_narrow<T, 2, Policy::kFewColumns>(args, stream);
  if (args.width <= 32) return run_narrow<T, 2>(args, stream);
  if (args.width <= 64) return run_narrow<T, 4>(args, stream);
  if (args.width <= 128) return run_narrow<T, 8>(args, stream);
  if (args.width <= 256) return run_narrow<T, 8, Policy::kManyColumns>(args, stream);
  if (args.width <= 512) return run_narrow<T, 16, Policy::kManyColumns>(args, stream);
  if (args.width <= 1024) return run_narrow<T, 32, Policy::kManyColumns>(args, stream);
  if (args.width <= 2048) return run_narrow<T, 64, Policy::kManyColumns>(args, stream);
  if (args.width <= 4096) return run_narrow<T, 128, Policy::kManyColumns>(args, stream);
  if (args.width <= 8192) return run_narrow<T, 256, Policy::kManyColumns>(args, stream);
  return launch(row_quantize_wide_kernel, args.rows, kThreads, 0, stream, args);
}

}  // namespace

cudaError_t row_quantize(const RowQuantizeArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  return dispatch(args.x_dtype, [&](auto x) { return run<decltype(x)>(args, stream); });
}

}  // namespace dct::cuda
