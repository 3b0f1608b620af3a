#pragma once

// Weight patches: header | BlockNumbers[blocks] | u16 words[capacity]. docs/reference/payload.md
// describes them, and docs/reference/ops.md describes checksums.

#include <cstdint>

#include "payload.h"

namespace dct {

constexpr int64_t kPatchBlock = 4096;  // elements; a position in a block fits 12 bits
constexpr int64_t kMostBlockWords = 2 * kPatchBlock;
constexpr uint16_t kPatchVersion = 5;
constexpr uint32_t kMostPatchWords = 0xffffffff;  // the largest capacity and count in a header

constexpr uint32_t kFullValue = 8;  // the code of a step that does not fit in 4 bits
constexpr uint32_t kLargestStep = 7;

constexpr int32_t kStatusNumbers = 2;  // kStatusHeader is 1
constexpr int32_t kStatusWords = 4;
constexpr int32_t kStatusOverflow = 8;

struct BlockNumbers {
  uint16_t entries, words;  // the words are the entries and the full values
};
static_assert(sizeof(BlockNumbers) == 4, "two numbers without padding");

DCT_HOST_DEVICE constexpr int64_t patch_blocks(int64_t numel) {
  return ceil_div(numel, kPatchBlock);
}

// The offset of the words.
DCT_HOST_DEVICE constexpr int64_t patch_words_offset(int64_t numel) {
  return sizeof(PayloadHeader) + sizeof(BlockNumbers) * patch_blocks(numel);
}

constexpr int64_t patch_bytes(int64_t numel, int64_t capacity) {
  return align16(patch_words_offset(numel) + 2 * capacity);
}

// The header of a patch whose changes need `words` words. They may exceed the capacity.
DCT_HOST_DEVICE inline PayloadHeader patch_header(int64_t numel, int64_t capacity, DType dtype,
                                                  uint64_t words) {
  PayloadHeader header = payload_header(numel, capacity, dtype, words, false);
  header.version = kPatchVersion;
  header.count = static_cast<uint32_t>(words < kMostPatchWords ? words : kMostPatchWords);
  return header;
}

// Validates the untrusted header of a patch that has space for `nbytes` bytes, at least
// patch_words_offset(numel). Returns the status.
DCT_HOST_DEVICE inline int32_t patch_header_status(const PayloadHeader& header, int64_t nbytes,
                                                   int64_t numel, DType dtype) {
  if (!header_kind_ok(header, kPatchVersion, dtype, kFlagOverflow, numel)) return kStatusHeader;
  if (header.flags != 0) return kStatusOverflow;
  const int64_t room = (nbytes - patch_words_offset(numel)) / 2;
  return header.count <= header.capacity && header.count <= room ? 0 : kStatusHeader;
}

// Whether a block of `length` elements can have these numbers.
DCT_HOST_DEVICE inline bool block_numbers_ok(BlockNumbers numbers, int64_t length) {
  return numbers.entries <= length && numbers.words >= numbers.entries &&
         numbers.words <= 2 * numbers.entries;
}

// The code of the step from one bit pattern to another.
DCT_HOST_DEVICE inline uint32_t step_code(uint32_t now, uint32_t before) {
  const uint32_t step = now - before;
  return ((step + kLargestStep) & 0xffff) <= 2 * kLargestStep ? step & 15 : kFullValue;
}

DCT_HOST_DEVICE inline uint16_t add_step(uint16_t bits, uint32_t code) {
  return static_cast<uint16_t>(bits + (code ^ 8) - 8);
}

constexpr int64_t kHashed = 4;  // elements that are hashed together
constexpr uint32_t kWordKey = 0x9E3779B1;
constexpr uint64_t kBlockKey = 0x9E3779B97F4A7C15;

// The hash of the bits of four elements, which are group `group` of their block. Processors
// multiply several pairs of 32-bit numbers in one instruction.
DCT_HOST_DEVICE inline uint64_t group_hash(uint64_t bits, uint32_t group) {
  const uint32_t low = static_cast<uint32_t>(bits) + (2 * group + 1) * kWordKey;
  const uint32_t high = static_cast<uint32_t>(bits >> 32) + (2 * group + 2) * kWordKey;
  return uint64_t{low} * high;
}

// The factor of the hashes of a block in the checksum of a tensor.
DCT_HOST_DEVICE inline uint64_t block_factor(int64_t block) {
  return (2 * static_cast<uint64_t>(block) + 1) * kBlockKey;
}

}  // namespace dct
