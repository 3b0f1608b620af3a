// Sums a few columns at a time. Their sums stay in registers while the messages are added.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "sum_codes.h"

namespace dct::cpu {
namespace {

// The hardware does not prefetch far enough if it reads few bytes from each of several streams.
constexpr int64_t kAheadBytes = 2048;

constexpr int64_t kMostColumns = 64;  // at a time; also the limit of the bytes read for them
constexpr int64_t kFewColumns = 16;   // at a time, in narrow rows

template <int64_t kColumns, typename Out, RowFormat kFormat>
void sum_rows(const RowDequantizeSumArgs& args, const Parallel& parallel) {
  auto* out = static_cast<Out*>(args.out);
  const int64_t width = args.width, bytes = row_bytes(width, kFormat);
  const int64_t message_bytes = args.rows * bytes, total_bytes = args.ranks * message_bytes;
  const bool streams = args.rows * width * static_cast<int64_t>(sizeof(Out)) >= kStreamBytes;
  // add_codes() may read past the end of a row. So rows that begin at `tail` or later are read from
  // a copy of the last bytes, which is followed by enough padding.
  const int64_t tail = std::max<int64_t>(total_bytes - bytes - kMostColumns, 0);
  std::vector<uint8_t> copy(total_bytes - tail + kMostColumns);
  std::copy_n(args.quantized + tail, total_bytes - tail, copy.data());
  const int64_t tasks = std::min(parallel.threads, args.rows);
  parallel.run(tasks, [&](int64_t task) {
    const Share span = share(args.rows, tasks, task);
    vectorize_unpacking([&](auto how) {
      using Sum = Group<decltype(how)::kVectorBytes, kColumns>;
      for (int64_t r = span.begin; r < span.end; ++r) {
        for (int64_t begin = 0; begin < width; begin += kColumns) {
          Sum registers;  // adding a value to -0.0 returns that value
          registers.for_each(
              [](typename Sum::Floats& floats, int) { floats = -typename Sum::Floats{}; });
          for (int64_t p = 0; p < args.ranks; ++p) {
            const int64_t at = p * message_bytes + r * bytes;
            const uint8_t* row = at < tail ? args.quantized + at : copy.data() + (at - tail);
            __builtin_prefetch(row + begin / codes_per_byte(kFormat) + kAheadBytes);
            add_codes<kFormat>(how, row, begin, scale_of<kFormat>(row, width), registers);
          }
          Sum sum = registers;  // a copy, because write_sums() takes the address of its argument
          const int64_t n = std::min(width - begin, kColumns), at = r * width + begin;
          write_sums(sum, 1.0f, n, span.end * width - at, streams, out + at);
        }
      }
    });
    stream_end();
  });
}

}  // namespace

void row_dequantize_sum(const RowDequantizeSumArgs& args, const Parallel& parallel) {
  dispatch(args.out_dtype, [&](auto out) {
    dispatch(args.format, [&](auto format) {
      constexpr RowFormat kFormat = decltype(format)::value;
      if (args.width <= kFewColumns) {
        // The compiler does not vectorize the rounding of fewer than 32 sums.
        constexpr bool kFew = std::is_same_v<decltype(out), float>;
        sum_rows<kFew ? kFewColumns : 2 * kFewColumns, decltype(out), kFormat>(args, parallel);
      } else if (args.width <= 2 * kFewColumns) {
        sum_rows<2 * kFewColumns, decltype(out), kFormat>(args, parallel);
      } else {
        sum_rows<kMostColumns, decltype(out), kFormat>(args, parallel);
      }
    });
  });
}

}  // namespace dct::cpu
