#pragma once

// row_quantize for wide rows, with one block per row. The block makes one pass over the row for the
// largest magnitude, one for the mean and one for the codes. The cache serves all passes after the
// first, unless the rows are too wide for it.

#include "../../common/ops.h"
#include "row_codes.cuh"
#include "row_elements.cuh"
#include "scan.cuh"

namespace dct::cuda {

struct WideRow {
  const RowQuantizeArgs& args;
  int64_t row;
  Word (&partials)[2][kWarps];

  __device__ float operator[](int64_t column) const {
    return load_element(args.x, row * args.width + column, args.x_dtype);
  }

  template <typename Operation>
  __device__ Word reduced(int index, Word value, Operation operation) const {
    return reduce_warps<kWarps>(reduce<kWarpSize>(value, operation), operation, partials[index]);
  }

  __device__ int top() const {
    int top = 0;
    for (int64_t c = thread_index(); c < args.width; c += kThreads) {
      top = larger(top, magnitude_bits((*this)[c]));
    }
    return static_cast<int>(reduced(0, static_cast<Word>(top), larger<Word>));
  }

  // The mean magnitude, in units.
  __device__ float mean_magnitude(float inverse_unit) const {
    Word total = 0;
    for (int64_t c = thread_index(); c < args.width; c += kThreads) {
      total += whole_units(fabsf(__fmul_rn((*this)[c], inverse_unit)));
    }
    return mean_of(reduced(1, total, sum<Word>), static_cast<Word>(args.width));
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
  __shared__ Word partials[2][kWarps];
  const WideRow row = {args, blockIdx.x, partials};
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
