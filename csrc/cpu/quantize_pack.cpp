// Quantizes one row of 1,024 entries at a time. The gradient and the residual are read from memory
// once. The new residual is written while the row is in the L1 cache.

#include <algorithm>
#include <vector>

#include "accumulate.h"
#include "kernels.h"
#include "quantize_row.h"

namespace dct::cpu {
namespace {

// Writes acc for `n` entries, then zeros up to the end of the row.
template <typename Grad>
void accumulate_row(const QuantizePackArgs& args, int64_t begin, int64_t n, float* acc) {
  const float inv_scale = load_scale(args.inv_scale);
  const auto* grad = static_cast<const Grad*>(args.grad);
  const float* residual = args.residual;
  if (residual == nullptr) {
    for (int64_t i = 0; i < n; ++i) acc[i] = to_float(grad[begin + i]) * inv_scale;
  } else {
    for (int64_t i = 0; i < n; ++i) {
      acc[i] = accumulate(residual[begin + i], grad, begin + i, inv_scale);
    }
  }
  std::fill(acc + n, acc + kRow, 0.0f);
}

template <typename Grad, PayloadFormat kFormat>
void quantize(const QuantizePackArgs& args, const Parallel& parallel) {
  const int64_t rows_per_range = num_rows(std::min(args.numel, args.range_length));
  const int64_t rows = args.ranges * rows_per_range;
  const int64_t tasks = std::min(parallel.threads, rows);
  std::vector<RowScratch> scratch(tasks);
  parallel.run(tasks, [&](int64_t task) {
    const Share span = share(rows, tasks, task);
    vectorize_packing([&](auto how) {
      RowScratch& row = scratch[task];
      for (int64_t r = span.begin; r < span.end; ++r) {
        const int64_t index = r / rows_per_range, in_range = r % rows_per_range;
        const Range range = range_of_length(args.numel, args.range_length, index);
        const int64_t begin = range.begin + in_range * kRow, n = std::min(range.end - begin, kRow);
        if (n <= 0) continue;  // the range is cut short by the end of the tensor
        uint8_t* payload = args.payload + index * args.nbytes;
        uint8_t* out = payload + sizeof(PayloadHeader) + in_range * row_bytes(kFormat);
        accumulate_row<Grad>(args, begin, n, row.acc);
        const bool in_place = args.residual != nullptr && n == kRow;
        if (args.residual != nullptr && !in_place) {
          std::copy_n(args.residual + begin, n, row.residual);
        }
        float* residual = in_place ? args.residual + begin : row.residual;
        if (!quantize_row<kFormat>(how, row, residual, out)) say_non_finite(payload);
        if (args.residual != nullptr && !in_place) {
          std::copy_n(row.residual, n, args.residual + begin);
        }
      }
    });
  });
}

}  // namespace

void quantize_pack(const QuantizePackArgs& args, const Parallel& parallel) {
  for (int64_t r = 0; r < args.ranges; ++r) {
    const Range range = range_of_length(args.numel, args.range_length, r);
    const PayloadHeader header = quantized_header(range.end - range.begin, args.format, false);
    std::memcpy(args.payload + r * args.nbytes, &header, sizeof(header));
  }
  dispatch(args.grad_dtype, [&](auto grad) {
    dispatch(args.format, [&](auto format) {
      quantize<decltype(grad), decltype(format)::value>(args, parallel);
    });
  });
}

}  // namespace dct::cpu
