#pragma once

// The sparse payload of one range: header | u32 starts[blocks + 1] | u16 positions[capacity] |
// value[capacity]. docs/reference/payload.md describes it.

#include <cstdint>

#include "floats.h"

namespace dct {

constexpr int64_t kBlock = 16384;  // elements; a position in a block fits 16 bits

constexpr uint32_t kPayloadMagic = 0x31544344;  // "DCT1"
constexpr uint16_t kPayloadVersion = 1;
constexpr uint8_t kFlagOverflow = 1;
constexpr uint8_t kFlagNonFinite = 2;

constexpr int32_t kStatusHeader = 1;
constexpr int32_t kStatusStarts = 2;
constexpr int32_t kStatusPositions = 4;

struct PayloadHeader {
  uint32_t magic;
  uint16_t version;
  uint8_t value_dtype;
  uint8_t flags;
  uint64_t numel;  // of the range
  uint32_t capacity;
  uint32_t count;  // entries packed
  uint64_t reserved[5];
};
static_assert(sizeof(PayloadHeader) == 64, "the header is 64 bytes without padding");

// Byte offsets of the sections in the payload of one range, and the size of this payload.
struct PayloadLayout {
  int64_t starts, positions, values, nbytes;
};

// Elements [begin, end).
struct Range {
  int64_t begin, end;
};

DCT_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

DCT_HOST_DEVICE constexpr int64_t align16(int64_t offset) { return (offset + 15) / 16 * 16; }

DCT_HOST_DEVICE constexpr int64_t num_blocks(int64_t numel) { return ceil_div(numel, kBlock); }

// The number of blocks in a range. The last ranges may have fewer blocks, or none.
DCT_HOST_DEVICE constexpr int64_t range_blocks(int64_t numel, int64_t ranges) {
  return ceil_div(num_blocks(numel), ranges);
}

// The number of elements in a full range of whole blocks.
DCT_HOST_DEVICE constexpr int64_t range_length(int64_t numel, int64_t ranges) {
  return range_blocks(numel, ranges) * kBlock;
}

// Range `index`, if full ranges have `length` elements.
DCT_HOST_DEVICE constexpr Range range_of_length(int64_t numel, int64_t length, int64_t index) {
  const int64_t begin = index * length, end = begin + length;
  return {begin < numel ? begin : numel, end < numel ? end : numel};
}

DCT_HOST_DEVICE constexpr Range range_bounds(int64_t numel, int64_t ranges, int64_t index) {
  return range_of_length(numel, range_length(numel, ranges), index);
}

DCT_HOST_DEVICE constexpr PayloadLayout payload_layout(int64_t numel, int64_t capacity,
                                                       DType value_dtype, int64_t ranges) {
  const int64_t starts = sizeof(PayloadHeader);
  const int64_t positions = align16(starts + 4 * (range_blocks(numel, ranges) + 1));
  const int64_t values = align16(positions + 2 * capacity);
  return {starts, positions, values, align16(values + itemsize(value_dtype) * capacity)};
}

// The header of a range in which `kept` entries pass the threshold. `kept` may exceed the capacity.
DCT_HOST_DEVICE inline PayloadHeader payload_header(int64_t numel, int64_t capacity,
                                                    DType value_dtype, uint64_t kept,
                                                    bool non_finite) {
  const bool overflow = kept > static_cast<uint64_t>(capacity);
  PayloadHeader header = {};
  header.magic = kPayloadMagic;
  header.version = kPayloadVersion;
  header.value_dtype = static_cast<uint8_t>(value_dtype);
  header.flags = (overflow ? kFlagOverflow : 0) | (non_finite ? kFlagNonFinite : 0);
  header.numel = static_cast<uint64_t>(numel);
  header.capacity = static_cast<uint32_t>(capacity);
  header.count = overflow ? header.capacity : static_cast<uint32_t>(kept);
  return header;
}

// Validates the fields of an untrusted header that do not depend on the capacity and the count.
template <typename Code>
DCT_HOST_DEVICE bool header_kind_ok(const PayloadHeader& header, uint16_t version, Code code,
                                    int known_flags, int64_t numel) {
  uint64_t reserved = 0;
  for (uint64_t word : header.reserved) reserved |= word;
  return header.magic == kPayloadMagic && header.version == version &&
         header.value_dtype == static_cast<uint8_t>(code) && (header.flags & ~known_flags) == 0 &&
         header.numel == static_cast<uint64_t>(numel) && reserved == 0;
}

// Validates an untrusted header against its range.
DCT_HOST_DEVICE inline bool header_ok(const PayloadHeader& header, int64_t numel, int64_t capacity,
                                      DType value_dtype) {
  constexpr int kKnown = kFlagOverflow | kFlagNonFinite;
  return header_kind_ok(header, kPayloadVersion, value_dtype, kKnown, numel) &&
         header.capacity == capacity && header.count <= header.capacity &&
         header.count <= header.numel;
}

// Whether the payload may lack non-finite entries. If so, the receiver sets the first element of
// the range to NaN.
DCT_HOST_DEVICE inline bool lost_non_finite(const PayloadHeader& header) {
  constexpr int kBoth = kFlagOverflow | kFlagNonFinite;
  return (header.flags & kBoth) == kBoth;
}

}  // namespace dct
