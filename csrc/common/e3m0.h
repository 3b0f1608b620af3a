#pragma once

// Payload version 2, "e3m0": an entry is 16 bits, a position in a sub-block, a sign and an exponent
// over the payload's scale: header | u32 starts[blocks + 1], u16 sub_starts[blocks][3] | u16
// entry[capacity]. One per range; docs/reference/payload.md describes it.
//
// Nothing is lost: value + residual is acc, bit for bit. Let v be the code's value, a power of two,
// a = |acc|, and u the unit in a's last place. A code is sent only if v <= 2 a (the smallest code
// takes half of itself, the others 3/4) and u <= v (below 2^24 times the largest code). Then a and
// v are both multiples of u, and so is a - v. Its magnitude is at most a, and every multiple of u
// up to a is a float32: the subtraction is exact, and so is the sum that gives a again.

#include <cstdint>

#include "payload.h"
#include "rounding.h"

namespace dct {

constexpr int64_t kSubBlock = 4096;  // elements; positions inside one fit 12 bits
constexpr int64_t kSubBlocks = kBlock / kSubBlock;

constexpr uint16_t kE3M0Version = 2;

// position << 4 | negative << 3 | exponent
struct E3M0 {
  uint16_t bits;
};

struct E3M0Layout {
  int64_t starts, sub_starts, entries, nbytes;
};

DCT_HOST_DEVICE constexpr E3M0Layout e3m0_layout(int64_t numel, int64_t capacity, int64_t ranges) {
  const int64_t blocks = range_blocks(numel, ranges);
  const int64_t starts = sizeof(PayloadHeader);
  const int64_t sub_starts = starts + 4 * (blocks + 1);
  const int64_t entries = align16(sub_starts + 2 * (kSubBlocks - 1) * blocks);
  return {starts, sub_starts, entries, align16(entries + 2 * capacity)};
}

// A payload's scale, which is what exponent 0 stands for: 2^(biased - 127), from 2^-126 to 2^120,
// so that every code is a normal number.
class E3M0Scale {
 public:
  static constexpr uint32_t kLeast = 1, kMost = 247;

  // The power of two that is nearest to any float's magnitude, the larger one of two.
  DCT_HOST_DEVICE static E3M0Scale nearest(float x) {
    const uint32_t biased = nearest_power(float_to_bits(x) & 0x7fffffffu);
    return E3M0Scale(biased < kLeast ? kLeast : biased > kMost ? kMost : biased);
  }

  DCT_HOST_DEVICE E3M0Scale() : E3M0Scale(kLeast) {}

  DCT_HOST_DEVICE explicit E3M0Scale(uint32_t biased)
      : biased_(biased),
        least_(biased == kLeast ? kHalf : (biased - 1) << 23),
        span_((biased + 31 < 255 ? biased + 31 : 255) << 23) {
    span_ -= least_;
  }

  DCT_HOST_DEVICE uint32_t biased() const { return biased_; }

  // Whether acc can be sent: half the scale or more, and less than 2^24 times the largest code.
  // What is not finite cannot.
  DCT_HOST_DEVICE bool holds(float acc) const {
    return (float_to_bits(acc) & 0x7fffffffu) - least_ < span_;
  }

  // The nearest code of what can be sent, of two the larger, as the low four bits of an entry.
  DCT_HOST_DEVICE uint32_t code(float acc) const {
    const uint32_t bits = float_to_bits(acc), power = nearest_power(bits & 0x7fffffffu);
    const uint32_t exponent = power < biased_ ? 0 : power - biased_;
    return (bits >> 31 << 3) | (exponent < 7 ? exponent : 7);
  }

  DCT_HOST_DEVICE float value(uint32_t code) const {
    return bits_to_float(((biased_ + (code & 7)) << 23) | (code & 8) << 28);
  }

 private:
  static constexpr uint32_t kHalf = 1u << 22;  // of a float32's mantissa

  // A magnitude from 1.5 times a power of two is nearest to the next one. Subnormal numbers too:
  // 2^-127, half the smallest scale, is what kHalf means there.
  DCT_HOST_DEVICE static uint32_t nearest_power(uint32_t magnitude) {
    return (magnitude + kHalf) >> 23;
  }

  uint32_t biased_, least_, span_;
};

DCT_HOST_DEVICE inline PayloadHeader e3m0_header(int64_t numel, int64_t capacity, E3M0Scale scale,
                                                 uint64_t kept, bool non_finite, bool damage) {
  PayloadHeader header = payload_header(numel, capacity, DType::kE3M0, kept, non_finite, damage);
  header.version = kE3M0Version;
  header.reserved[0] = scale.biased();
  return header;
}

// But for what is version 2's own, the rules are those of version 1.
DCT_HOST_DEVICE inline bool e3m0_header_ok(const PayloadHeader& header, int64_t numel,
                                           int64_t capacity) {
  PayloadHeader common = header;
  common.version = kPayloadVersion;
  common.reserved[0] = 0;
  const uint64_t biased = header.reserved[0];
  return header.version == kE3M0Version && biased >= E3M0Scale::kLeast &&
         biased <= E3M0Scale::kMost && header_ok(common, numel, capacity, DType::kE3M0);
}

}  // namespace dct
