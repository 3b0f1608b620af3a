#pragma once

// The samples of sample_threshold: one hashed pick in each of `picks` strata of a range.
// The lengths of the strata differ by at most one element.

#include <cstdint>

#include "floats.h"

namespace dct {

DCT_HOST_DEVICE inline uint32_t hash32(uint32_t seed, uint32_t segment, uint32_t index) {
  uint32_t x = (seed * 0x9E3779B1u) ^ (segment * 0x85EBCA77u) ^ (index * 0xC2B2AE3Du);
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  return x;
}

// floor(index * numel / picks) for index <= picks < 2^31, without overflow of the product.
DCT_HOST_DEVICE inline int64_t stratum_start(int64_t index, int64_t numel, int64_t picks) {
  return index * (numel / picks) + index * (numel % picks) / picks;
}

// The index, within a stratum of `length` elements, of the element to sample.
DCT_HOST_DEVICE inline int64_t pick_offset(uint64_t length, uint32_t seed, uint32_t segment,
                                           uint32_t index) {
  const uint64_t hash = hash32(seed, segment, index);
  // (hash * length) >> 32. The two halves of the hash keep both products within 64 bits.
  return ((hash >> 16) * length + (((hash & 0xffff) * length) >> 16)) >> 16;
}

// The sampled element of stratum `index`, in a range of `numel` elements. The remainder shows
// whether the stratum has `length` + 1 elements, which saves another division.
DCT_HOST_DEVICE inline int64_t stratified_pick(int64_t index, int64_t numel, int64_t picks,
                                               uint32_t seed, uint32_t segment) {
  const int64_t length = numel / picks, rest = numel % picks;
  const int64_t longer_before = index * rest / picks;
  const int64_t remainder = index * rest - longer_before * picks;
  return index * length + longer_before +
         pick_offset(length + (remainder + rest >= picks), seed, segment,
                     static_cast<uint32_t>(index));
}

}  // namespace dct
