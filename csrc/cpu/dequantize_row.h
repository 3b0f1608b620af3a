#pragma once

// Sums rows of 1,024 entries from dense payloads, 64 entries at a time in registers.

#include <cstring>
#include <vector>

#include "../common/quantized_payload.h"
#include "parallel.h"
#include "sum_codes.h"

namespace dct::cpu {

// Returns which payloads [ranks, ranges, nbytes] have a valid header. Writes `status` [ranks].
inline std::vector<uint8_t> check_headers(const uint8_t* payloads, int64_t ranks, int64_t ranges,
                                          int64_t nbytes, int64_t numel, PayloadFormat format,
                                          int32_t* status) {
  std::vector<uint8_t> intact(ranks * ranges);
  for (int64_t p = 0; p < ranks; ++p) {
    status[p] = 0;
    for (int64_t r = 0; r < ranges; ++r) {
      const Range range = range_bounds(numel, ranges, r);
      PayloadHeader header;
      std::memcpy(&header, payloads + (p * ranges + r) * nbytes, sizeof(header));
      intact[p * ranges + r] = quantized_header_ok(header, range.end - range.begin, format);
      if (!intact[p * ranges + r]) status[p] = kStatusHeader;
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

// Calls function(begin, sum) for every 64 elements of `rows`. `begin` is the index of the first
// element. `sum` is a Group: the values of the payloads, added in rank order from +0.0.
template <PayloadFormat kFormat, typename Function>
void for_each_sum(const uint8_t* payloads, const std::vector<uint8_t>& intact, int64_t ranks,
                  int64_t ranges, int64_t nbytes, int64_t rows_per_range, Share rows,
                  const Function& function) {
  // The hardware does not prefetch far enough ahead in several narrow streams.
  constexpr int64_t kAheadBytes = 2048;
  std::vector<const uint8_t*> row(ranks);  // the current row of each payload with a valid header
  vectorize_unpacking([&](auto how) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const int64_t range = r / rows_per_range;
      const int64_t at = sizeof(PayloadHeader) + r % rows_per_range * row_bytes(kFormat);
      int64_t count = 0;
      for (int64_t p = 0; p < ranks; ++p) {
        const int64_t payload = p * ranges + range;
        if (intact[payload]) row[count++] = payloads + payload * nbytes + at;
      }
      for (int64_t g = 0; g < kScales; ++g) {
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
        Sum sum = registers;  // `function` takes the address of the copy, not of `registers`
        function(r * kRow + g * kScaled, sum);
      }
    }
  });
}

}  // namespace dct::cpu
