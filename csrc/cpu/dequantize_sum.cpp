// Sums 64 entries at a time. The sum stays in registers until it is written.

#include <algorithm>

#include "dequantize_row.h"
#include "kernels.h"

namespace dct::cpu {
namespace {

template <typename Out, PayloadFormat kFormat>
void sum_rows(const DequantizeSumArgs& args, const Parallel& parallel) {
  auto* out = static_cast<Out*>(args.out);
  const float factor = args.out_scale != nullptr ? args.scale * *args.out_scale : args.scale;
  const bool streams = args.numel * static_cast<int64_t>(sizeof(Out)) >= kStreamBytes &&
                       reinterpret_cast<intptr_t>(out) % 64 == 0;
  const auto intact = check_headers(args.payloads, args.ranks, args.ranges, args.nbytes, args.numel,
                                    args.format, args.status);
  const int64_t rows = num_rows(args.numel);
  const int64_t rows_per_range = range_blocks(args.numel, args.ranges) * (kBlock / kRow);
  const int64_t tasks = std::min(parallel.threads, rows);
  parallel.run(tasks, [&](int64_t task) {
    const auto write = [&](int64_t begin, auto& sum) {
      if (begin >= args.numel) return;
      const int64_t n = std::min(args.numel - begin, kScaled);
      write_sums(sum, factor, n, streams && n == kScaled, out + begin);
    };
    for_each_sum<kFormat>(args.payloads, intact, args.ranks, args.ranges, args.nbytes,
                          rows_per_range, share(rows, tasks, task), write);
    stream_end();
  });
}

}  // namespace

void dequantize_sum(const DequantizeSumArgs& args, const Parallel& parallel) {
  dispatch(args.out_dtype, [&](auto out) {
    dispatch(args.format, [&](auto format) {
      sum_rows<decltype(out), decltype(format)::value>(args, parallel);
    });
  });
}

}  // namespace dct::cpu
