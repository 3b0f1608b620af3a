// Sums 64 entries at a time. The sum stays in registers until it is written.

#include <algorithm>

#include "dequantize_row.h"
#include "kernels.h"
#include "streaming.h"

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
      using Sum = std::remove_reference_t<decltype(sum)>;
      using Floats = typename Sum::Floats;
      if (begin >= args.numel) return;
      const int64_t n = std::min(args.numel - begin, kScaled);
      if (!streams) prefetch_ahead(out + begin, n);
      if (std::is_same_v<Out, float> && n == kScaled) {
        auto* target = reinterpret_cast<float*>(out + begin);
        sum.for_each([&](Floats& floats, int i) {
          const Floats scaled = floats * factor, nan = Floats{} + bits_to_float(kFloat32Nan);
          const Floats rounded = scaled == scaled ? scaled : nan;
          if (streams) {
            Sum::Own::stream(rounded, target + i);
          } else {
            std::memcpy(target + i, &rounded, sizeof(rounded));
          }
        });
      } else {
        alignas(64) Out rounded[kScaled];
        const auto* sums = reinterpret_cast<const float*>(&sum);
        for (int64_t i = 0; i < kScaled; ++i) rounded[i] = round_to<Out>(factor * sums[i]);
        if (streams && n == kScaled) {
          stream_aligned(out + begin, rounded, sizeof(rounded));
        } else {
          std::copy_n(rounded, n, out + begin);
        }
      }
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
