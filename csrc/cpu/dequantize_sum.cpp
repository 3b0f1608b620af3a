// Sums rows of 1,024 entries, 64 entries at a time. The sum stays in registers until it is written.

#include <algorithm>
#include <cstring>
#include <vector>

#include "../common/quantized_payload.h"
#include "kernels.h"
#include "sum_codes.h"

namespace dct::cpu {
namespace {

// The hardware does not prefetch far enough ahead in several narrow streams.
constexpr int64_t kAheadBytes = 2048;

// Returns which payloads [ranks, ranges] have a valid header. Writes the status.
std::vector<uint8_t> check_headers(const DequantizeSumArgs& args) {
  std::vector<uint8_t> intact(args.ranks * args.ranges);
  std::fill_n(args.status, args.ranks * args.statuses, 0);
  for (int64_t p = 0; p < args.ranks; ++p) {
    for (int64_t r = 0; r < args.ranges; ++r) {
      const Range range = range_of_length(args.numel, args.range_length, r);
      PayloadHeader header;
      std::memcpy(&header, args.payloads + (p * args.ranges + r) * args.nbytes, sizeof(header));
      const bool valid = quantized_header_ok(header, range.end - range.begin, args.format);
      intact[p * args.ranges + r] = valid;
      if (!valid) args.status_of(p, r) = kStatusHeader;
    }
  }
  return intact;
}

// Adds the values of group `g` of a row to `sum`, which stays in registers.
template <PayloadFormat kFormat, typename Unpack, typename Sum>
void add_group(Unpack how, const uint8_t* row, int64_t g, Sum& sum) {
  using Floats = typename Sum::Floats;
  const uint8_t* codes = row + g * scaled_code_bytes(kFormat);
  const auto add = [&](const auto* values) {
    sum.for_each([&](Floats& floats, int i) {
      Floats more;
      Sum::Own::widen(values + i, more);
      floats += more;
    });
  };
  if constexpr (kFormat == PayloadFormat::kFloat32) {
    add(reinterpret_cast<const float*>(codes));  // rows are aligned to 16 bytes
  } else if constexpr (kFormat == PayloadFormat::kBFloat16) {
    add(reinterpret_cast<const BFloat16*>(codes));
  } else {
    BFloat16 rounded;
    std::memcpy(&rounded, row + row_code_bytes(kFormat) + g * kScaleBytes, kScaleBytes);
    add_codes<row_format(kFormat)>(how, codes, 0, to_float(rounded), sum);
  }
}

template <typename Out, PayloadFormat kFormat>
void sum_rows(const DequantizeSumArgs& args, const Parallel& parallel) {
  auto* out = static_cast<Out*>(args.out);
  const float factor = args.out_scale != nullptr ? args.scale * *args.out_scale : args.scale;
  const bool streams = args.numel * static_cast<int64_t>(sizeof(Out)) >= kStreamBytes &&
                       reinterpret_cast<intptr_t>(out) % 64 == 0;
  const auto intact = check_headers(args);
  const int64_t rows_per_range = num_rows(std::min(args.numel, args.range_length));
  const int64_t rows = args.ranges * rows_per_range;
  const int64_t tasks = std::min(parallel.threads, rows);
  parallel.run(tasks, [&](int64_t task) {
    const Share span = share(rows, tasks, task);
    std::vector<const uint8_t*> row(args.ranks);  // the row of each payload with a valid header
    vectorize_unpacking([&](auto how) {
      for (int64_t r = span.begin; r < span.end; ++r) {
        const int64_t index = r / rows_per_range, in_range = r % rows_per_range;
        const Range range = range_of_length(args.numel, args.range_length, index);
        const int64_t at = sizeof(PayloadHeader) + in_range * row_bytes(kFormat);
        int64_t count = 0;
        for (int64_t p = 0; p < args.ranks; ++p) {
          const int64_t payload = p * args.ranges + index;
          if (intact[payload]) row[count++] = args.payloads + payload * args.nbytes + at;
        }
        for (int64_t g = 0; g < kScales; ++g) {
          const int64_t begin = range.begin + in_range * kRow + g * kScaled;
          if (begin >= range.end) break;
          using Sum = Group<decltype(how)::kVectorBytes>;
          Sum registers;
          registers.for_each(
              [](typename Sum::Floats& floats, int) { floats = typename Sum::Floats{}; });
          for (int64_t p = 0; p < count; ++p) {
            if (has_scales(kFormat)) {
              __builtin_prefetch(row[p] + g * row_bytes(kFormat) / kScales + kAheadBytes);
            }
            add_group<kFormat>(how, row[p], g, registers);
          }
          Sum sum = registers;  // a copy, because write_sums() takes the address of its argument
          const int64_t n = std::min(range.end - begin, kScaled);
          write_sums(sum, factor, n, n, streams && n == kScaled, out + begin);
        }
      }
    });
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
