#pragma once

// Sparse payloads, written and read as docs/reference/payload.md specifies.

#include <cmath>
#include <cstring>
#include <vector>

#include "../../csrc/common/payload.h"
#include "support.h"

namespace dct::test {

template <typename Value>
void put_sparse_header(uint8_t* out, int64_t numel, int64_t capacity, int64_t count,
                       int64_t flags) {
  std::memset(out, 0, 64);
  std::memcpy(out, "DCT1\1", 5);
  out[6] = sizeof(Value) == 4 ? 0 : 1;
  out[7] = static_cast<uint8_t>(flags);
  std::memcpy(out + 8, &numel, 8);
  std::memcpy(out + 16, &capacity, 4);
  std::memcpy(out + 20, &count, 4);
}

// Writes a valid payload of a range with random entries.
template <typename Value>
void put_sparse(Random& random, uint8_t* out, const PayloadLayout& layout, int64_t numel,
                int64_t capacity) {
  std::vector<uint32_t> starts;
  uint32_t count = 0;
  const double density = random.pick({0.001, 0.02, 1.0});
  for (int64_t i = 0; i < numel; ++i) {
    if (i % kBlock == 0) starts.push_back(count);
    if (count == capacity || !random.chance(density)) continue;
    const auto position = static_cast<uint16_t>(i % kBlock);
    const auto value = make<Value>(random.real());
    std::memcpy(out + layout.positions + 2 * int64_t{count}, &position, 2);
    std::memcpy(out + layout.values + sizeof(Value) * count, &value, sizeof(Value));
    ++count;
  }
  starts.push_back(count);
  std::memcpy(out + layout.starts, starts.data(), 4 * starts.size());
  put_sparse_header<Value>(out, numel, capacity, count,
                           random.chance(0.1) ? 3 : random.integer(0, 2));
}

// Calls add(element, value) for every entry in the valid blocks of a range's payload, and returns
// its status.
template <typename Value, typename Add>
int32_t read(const uint8_t* in, const PayloadLayout& layout, int64_t numel, int64_t capacity,
             const Add& add) {
  auto number = [&](int64_t offset, int bytes) {
    uint64_t n = 0;
    std::memcpy(&n, in + offset, bytes);
    return static_cast<int64_t>(n);
  };
  const int64_t count = number(20, 4), flags = number(7, 1), code = sizeof(Value) == 4 ? 0 : 1;
  bool ok = std::memcmp(in, "DCT1", 4) == 0 && number(4, 2) == 1 && number(6, 1) == code &&
            flags < 4 && number(8, 8) == numel && number(16, 4) == capacity && count <= capacity &&
            count <= numel;
  for (int i = 24; i < 64; ++i) ok = ok && in[i] == 0;
  if (!ok) return 1;
  const int64_t blocks = (numel + kBlock - 1) / kBlock;
  int32_t status = 0;
  if (blocks == 0 && number(layout.starts, 4) != 0) status |= 2;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t first = number(layout.starts + 4 * b, 4);
    const int64_t end = number(layout.starts + 4 * b + 4, 4);
    if (first > end || end > count || (b == 0 && first != 0) || (b + 1 == blocks && end != count)) {
      status |= 2;
      continue;
    }
    const int64_t length = std::min(kBlock, numel - b * kBlock);
    bool ascending = true;
    for (int64_t e = first, last = -1; e < end; ++e) {
      const int64_t position = number(layout.positions + 2 * e, 2);
      ascending = ascending && position > last && position < length;
      last = position;
    }
    if (!ascending) status |= 4;
    for (int64_t e = first; ascending && e < end; ++e) {
      const auto pattern =
          static_cast<uint32_t>(number(layout.values + sizeof(Value) * e, sizeof(Value)));
      add(b * kBlock + number(layout.positions + 2 * e, 2),
          static_cast<float>(decode<Value>(pattern)));
    }
  }
  if (numel > 0 && (flags & 3) == 3) add(0, NAN);
  return status;
}

}  // namespace dct::test
