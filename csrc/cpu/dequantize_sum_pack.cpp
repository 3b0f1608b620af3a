// dequantize_sum and quantize_pack in one pass. The sum never leaves the L1 cache.

#include <algorithm>
#include <vector>

#include "dequantize_row.h"
#include "kernels.h"
#include "quantize_row.h"

namespace dct::cpu {
namespace {

template <PayloadFormat kFormat>
void pack_row(const DequantizeSumPackArgs& args, int64_t r, RowScratch& row) {
  const int64_t n = std::min(args.numel - r * kRow, kRow);
  float* residual = args.residual + r * kRow;
  if (n < kRow) std::copy_n(residual, n, row.residual);
  uint8_t* out = args.payload + sizeof(PayloadHeader) + r * row_bytes(kFormat);
  vectorize_packing([&](auto how) {
    if (!quantize_row<kFormat>(how, row, n < kRow ? row.residual : residual, out)) {
      say_non_finite(args.payload);
    }
  });
  if (n < kRow) std::copy_n(row.residual, n, residual);
}

template <PayloadFormat kFormat>
void sum_and_pack(const DequantizeSumPackArgs& args, const Parallel& parallel) {
  const auto intact = check_headers(args.payloads, args.ranks, 1, args.nbytes_in, args.numel,
                                    args.format, args.status);
  const PayloadHeader header = quantized_header(args.numel, args.format, false);
  std::memcpy(args.payload, &header, sizeof(header));
  const int64_t rows = num_rows(args.numel), tasks = std::min(parallel.threads, rows);
  std::vector<RowScratch> scratch(tasks);
  parallel.run(tasks, [&](int64_t task) {
    RowScratch& row = scratch[task];
    const auto pack = [&](int64_t begin, const auto& sum) {
      const int64_t at = begin % kRow, n = std::clamp<int64_t>(args.numel - begin, 0, kScaled);
      const auto* sums = reinterpret_cast<const float*>(&sum);
      const float* residual = args.residual + begin;
      for (int64_t i = 0; i < n; ++i) row.acc[at + i] = residual[i] + args.scale * sums[i];
      std::fill(row.acc + at + n, row.acc + at + kScaled, 0.0f);
      if (at + kScaled == kRow) pack_row<kFormat>(args, begin / kRow, row);
    };
    for_each_sum<kFormat>(args.payloads, intact, args.ranks, 1, args.nbytes_in, rows,
                          share(rows, tasks, task), pack);
  });
}

}  // namespace

void dequantize_sum_pack(const DequantizeSumPackArgs& args, const Parallel& parallel) {
  dispatch(args.format,
           [&](auto format) { sum_and_pack<decltype(format)::value>(args, parallel); });
}

}  // namespace dct::cpu
