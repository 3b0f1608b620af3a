#pragma once

// row_quantize for wide rows, with one block per row. The block makes one pass over the row for the
// largest magnitude, one for the mean and one for the codes. The cache serves all passes after the
// first, unless the rows are too wide for it.

#include "../../common/ops.h"
#include "device.cuh"
#include "row_codes.cuh"
#include "row_elements.cuh"

namespace dct::cuda {

template <typename T>
__device__ T larger(T a, T b) {
  return a > b ? a : b;
}
template <typename T>
__device__ T sum(T a, T b) {
  return a + b;
}

// Reduces over groups of kLanes lanes.
template <int kLanes, typename Value, typename Operation>
__device__ Value reduce(Value value, Operation operation) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = operation(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

struct Partials {
  Word warp[kWarps];
};

// Reduces over a block.
template <typename Value, typename Operation>
__device__ Value reduce_block(Value value, Operation operation) {
  __shared__ Partials partials;
  value = reduce<kWarpSize>(value, operation);
  if (lane_index() == 0) partials.warp[warp_index()] = static_cast<Word>(value);
  __syncthreads();
  value = static_cast<Value>(partials.warp[0]);
  for (int warp = 1; warp < kWarps; ++warp) {
    value = operation(value, static_cast<Value>(partials.warp[warp]));
  }
  __syncthreads();
  return value;
}

struct WideRow {
  const RowQuantizeArgs& args;
  int64_t row;

  __device__ float operator[](int64_t column) const {
    return load_element(args.x, row * args.width + column, args.x_dtype);
  }

  __device__ int top() const {
    int top = 0;
    for (int64_t c = thread_index(); c < args.width; c += kThreads) {
      top = larger(top, magnitude_bits((*this)[c]));
    }
    return reduce_block(top, larger<int>);
  }

  // The mean magnitude, in units.
  __device__ float mean_magnitude(float inverse_unit) const {
    Word total = 0;
    for (int64_t c = thread_index(); c < args.width; c += kThreads) {
      total += whole_units(fabsf(__fmul_rn((*this)[c], inverse_unit)));
    }
    return mean_of(reduce_block(total, sum<Word>), static_cast<Word>(args.width));
  }

  template <RowFormat kFormat>
  __device__ void quantize() const {
    const int highest = top();
    float mean = 0.0f;
    if constexpr (kFormat == RowFormat::kSign) {
      mean = mean_magnitude(units_of(highest).inverse_unit);
    }
    const RowQuantizer quantizer(kFormat, highest, mean);
    constexpr int kCodesPerByte = codes_per_byte(kFormat);
    const int64_t bytes = code_bytes(args.width, kFormat);
    uint8_t* out = args.out + row * row_bytes(args.width, kFormat);
    for (int64_t i = thread_index(); i < bytes; i += kThreads) {
      const uint8_t byte = pack_byte<kFormat>([&](int k) -> uint32_t {
        const int64_t column = i * kCodesPerByte + k;
        return quantizer.code<kFormat>(column < args.width ? (*this)[column] : 0.0f);
      });
      out[i] = quantizer.usable ? byte : 0;
    }
    if (thread_index() < kScaleBytes) {
      out[bytes + thread_index()] =
          static_cast<uint8_t>(quantizer.scale.bits >> 8 * thread_index());
    }
  }
};

__global__ void __launch_bounds__(kThreads) row_quantize_wide_kernel(RowQuantizeArgs args) {
  const WideRow row = {args, blockIdx.x};
  switch (args.format) {
    case RowFormat::kInt8:
      return row.quantize<RowFormat::kInt8>();
    case RowFormat::kInt4:
      return row.quantize<RowFormat::kInt4>();
    default:
      return row.quantize<RowFormat::kSign>();
  }
}

}  // namespace dct::cuda
