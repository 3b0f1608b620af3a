// payload.h -- a payload written entry by entry, from docs/reference/payload.md.
#pragma once

#include <algorithm>

#include "support.h"

namespace test {

struct Payload {
  int64_t begin, end, nbytes;  // elements of the range; bytes of its payload
  int64_t capacity, positions_at, values_at;
  DType value_dtype;
  uint8_t flags = 0;
  std::vector<uint32_t> starts;
  std::vector<uint16_t> positions;
  std::vector<uint32_t> values;  // bits

  Payload(int64_t numel, int64_t ranges, int64_t range, int64_t capacity, DType value_dtype)
      : capacity(capacity), value_dtype(value_dtype) {
    const int64_t blocks = (numel + 16383) / 16384, each = (blocks + ranges - 1) / ranges;
    begin = std::min(range * each * 16384, numel);
    end = std::min((range + 1) * each * 16384, numel);
    positions_at = (64 + 4 * (each + 1) + 15) / 16 * 16;
    values_at = (positions_at + 2 * capacity + 15) / 16 * 16;
    nbytes = (values_at + itemsize() * capacity + 15) / 16 * 16;
  }

  int64_t itemsize() const { return value_dtype == DType::kFloat32 ? 4 : 2; }
  int64_t blocks() const { return (end - begin + 16383) / 16384; }
  int64_t count() const { return static_cast<int64_t>(positions.size()); }

  void start_block() { starts.push_back(static_cast<uint32_t>(count())); }
  // Packs element `index` of the range; returns the value that travels.
  float append(int64_t index, float x) {
    positions.push_back(static_cast<uint16_t>(index % 16384));
    values.push_back(narrow(x, value_dtype, true));
    return widen(values.back(), value_dtype);
  }
  void finish(int with_flags) {
    flags = static_cast<uint8_t>(with_flags);
    start_block();
  }

  void write_header(uint8_t* bytes) const {
    const uint64_t numel = end - begin;
    const uint32_t sizes[2] = {static_cast<uint32_t>(capacity), static_cast<uint32_t>(count())};
    std::memset(bytes, 0, 64);
    std::memcpy(bytes, "DCT1\1\0", 6);
    bytes[6] = value_dtype == DType::kFloat32 ? 0 : 1;
    bytes[7] = flags;
    std::memcpy(bytes + 8, &numel, 8);
    std::memcpy(bytes + 16, sizes, 8);
  }
  void write(uint8_t* bytes) const {
    write_header(bytes);
    std::memcpy(bytes + 64, starts.data(), 4 * starts.size());
    for (int64_t i = 0; i < count(); ++i) {
      std::memcpy(bytes + positions_at + 2 * i, &positions[i], 2);
      std::memcpy(bytes + values_at + i * itemsize(), &values[i], itemsize());
    }
  }
};

}  // namespace test
