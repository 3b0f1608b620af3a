#pragma once

// Reference implementation of dense payloads, in integers and doubles.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "../../csrc/common/quantized_payload.h"
#include "row_oracle.h"
#include "support.h"

namespace dct::test {

constexpr int64_t kEntries = 1024, kPerGroup = 64, kGroups = 16;  // of a row

struct Kind {
  PayloadFormat format;
  uint8_t code;
  int64_t code_bytes;  // of 64 entries
  RowFormat rows;      // unused without scales

  bool scaled() const { return code >= 4; }
  int64_t row_bytes() const { return kGroups * (code_bytes + (scaled() ? 2 : 0)); }
};

constexpr Kind kKinds[] = {
    {PayloadFormat::kFloat32, 0, 256, RowFormat::kSign},
    {PayloadFormat::kBFloat16, 1, 128, RowFormat::kSign},
    {PayloadFormat::kInt8, 4, 64, RowFormat::kInt8},
    {PayloadFormat::kInt4, 5, 32, RowFormat::kInt4},
    {PayloadFormat::kTernary, 6, 13, RowFormat::kTernary},
};

inline int64_t rows_of(int64_t numel) { return (numel + kEntries - 1) / kEntries; }

inline int64_t bytes_for(const Kind& kind, int64_t numel, int64_t ranges, int64_t room) {
  return 64 + rows_of(range_bounds(numel, ranges, 0).end) * kind.row_bytes() + room;
}

inline void put_header(uint8_t* out, const Kind& kind, int64_t numel, int flags) {
  std::memset(out, 0, 64);
  std::memcpy(out, "DCT1\4", 5);
  out[6] = kind.code;
  out[7] = static_cast<uint8_t>(flags);
  std::memcpy(out + 8, &numel, 8);
  std::memcpy(out + 16, &numel, 4);
  std::memcpy(out + 20, &numel, 4);
}

// The value of entry `i` of a row with arbitrary bytes.
inline float entry(const uint8_t* row, int64_t i, const Kind& kind) {
  uint32_t u = 0;
  if (!kind.scaled()) {
    const int64_t size = kind.code_bytes / kPerGroup;
    std::memcpy(&u, row + i * size, size);
    return static_cast<float>(size == 4 ? decode<float>(u) : decode<BFloat16>(u));
  }
  const int64_t group = i / kPerGroup;
  std::memcpy(&u, row + kGroups * kind.code_bytes + 2 * group, 2);
  const int code = code_at(row + group * kind.code_bytes, i % kPerGroup, kind.rows);
  return multiply(static_cast<float>(code), static_cast<float>(decode<BFloat16>(u)));
}

// Writes the bytes of a row, and marks the entries that are sent.
inline void put_row(uint8_t* row, const float* acc, const Kind& kind, bool* sent) {
  std::vector<int> codes;
  for (int64_t i = 0; i < kEntries; ++i) {
    if (!kind.scaled()) {
      const int64_t size = kind.code_bytes / kPerGroup;
      const uint32_t u = size == 4 ? encode<float>(acc[i]) : encode<BFloat16>(acc[i], true);
      std::memcpy(row + i * size, &u, size);
      sent[i] = std::isfinite(acc[i]);
    } else if (i % kPerGroup == 0) {
      const std::vector<double> x(acc + i, acc + i + kPerGroup);
      const uint32_t scale = expected_codes(x.data(), kPerGroup, kind.rows, codes);
      const std::vector<uint8_t> bytes = packed(codes, scale, kind.rows);
      const int64_t group = i / kPerGroup;
      std::memcpy(row + group * kind.code_bytes, bytes.data(), kind.code_bytes);
      std::memcpy(row + kGroups * kind.code_bytes + 2 * group, bytes.data() + kind.code_bytes, 2);
      std::fill_n(sent + i, kPerGroup, scale != 0x7fc0);
    }
  }
}

// Writes the payload of a range, and updates the residual if there is one.
inline void put(uint8_t* out, const std::vector<float>& acc, float* residual, const Kind& kind) {
  const auto numel = static_cast<int64_t>(acc.size());
  bool sent[kEntries], all = true;
  float padded[kEntries];
  for (int64_t begin = 0; begin < numel; begin += kEntries) {
    const int64_t n = std::min(kEntries, numel - begin);
    std::fill(std::copy_n(acc.data() + begin, n, padded), padded + kEntries, 0.0f);
    uint8_t* row = out + 64 + begin / kEntries * kind.row_bytes();
    put_row(row, padded, kind, sent);
    for (int64_t i = 0; i < n; ++i) {
      all = all && sent[i];
      if (residual == nullptr) continue;
      float& old = residual[begin + i];
      if (sent[i]) {
        old = add(padded[i], -entry(row, i, kind));
      } else if (!std::isfinite(old)) {
        old = 0;
      }
    }
  }
  put_header(out, kind, numel, all ? 0 : 2);
}

// Returns the sum of payloads [ranks, ranges, nbytes] with arbitrary bytes, and writes the status
// of each rank. A full range has `length` elements. Payloads with a wrong header are not added.
inline std::vector<float> sum_of(const uint8_t* payloads, int64_t ranks, int64_t ranges,
                                 int64_t length, int64_t nbytes, int64_t numel, const Kind& kind,
                                 std::vector<int32_t>& status) {
  std::vector<float> sum(numel, 0.0f);
  status.assign(ranks, 0);
  for (int64_t p = 0; p < ranks; ++p) {
    for (int64_t r = 0; r < ranges; ++r) {
      const Range range = range_of_length(numel, length, r);
      const uint8_t* in = payloads + (p * ranges + r) * nbytes;
      uint8_t header[64];
      put_header(header, kind, range.end - range.begin, in[7] & 2);
      if (std::memcmp(in, header, 64) != 0) {
        status[p] = 1;
        continue;
      }
      for (int64_t i = 0; i < range.end - range.begin; ++i) {
        const uint8_t* row = in + 64 + i / kEntries * kind.row_bytes();
        float& target = sum[range.begin + i];
        target = add(target, entry(row, i % kEntries, kind));
      }
    }
  }
  return sum;
}

}  // namespace dct::test
