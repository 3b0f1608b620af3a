#pragma once

// Quantizes a row of 1,024 entries into its bytes in a payload, by one warp. The entries stay in
// the registers of their lanes, which finally hold the new residual. All 16 groups of 64 are
// quantized together. A half-warp reduces its eight groups together, which leaves the result of
// each group in two lanes. Only these lanes divide, and they pass their result to the others.

#include "elements.cuh"
#include "entry_rows.cuh"
#include "row_codes.cuh"

namespace dct::cuda {

// The old residual of a row. Entries that are not sent keep their old residual.
struct OldResidual {
  const float* row;  // or null
  int length;
  __device__ float operator()(int vector, int e) const {
    const bool there = row != nullptr && is_within(vector, e, length);
    return there ? finite_or_zero(row[column_of(vector) + e]) : 0.0f;
  }
};

// Shared memory to stage a row of ternary codes from bytes to vectors. Other formats need none.
template <PayloadFormat kFormat>
constexpr int kTernaryBytes = kFormat == PayloadFormat::kTernary ? row_bytes(kFormat) : 0;

constexpr int kHalfWarp = kWarpSize / 2;

// The group whose reduced value a lane holds.
__device__ inline int group_of_lane() {
  return lane_index() / 2 % kRowVectors * 2 + lane_index() / kHalfWarp;
}
// The value of the group that contains a vector of this lane.
template <typename T>
__device__ T of_vector(T value, int vector) {
  return __shfl_sync(kFullWarp, value, 2 * vector, kHalfWarp);
}

// Reduces the values of every vector over its half-warp. Returns the result of group_of_lane().
// Every step halves the vectors that a lane still reduces. This takes 8 shuffles; reducing the
// vectors one by one would take 32.
template <typename T, typename Operation>
__device__ T reduce_groups(T (&values)[kRowVectors], Operation operation) {
#pragma unroll
  for (int left = kRowVectors / 2; left > 0; left /= 2) {
    const bool upper = (lane_index() & 2 * left) != 0;
#pragma unroll
    for (int v = 0; v < left; ++v) {
      const T sent = upper ? values[v] : values[v + left];
      const T kept = upper ? values[v + left] : values[v];
      values[v] = operation(kept, __shfl_xor_sync(kFullWarp, sent, 2 * left));
    }
  }
  return operation(values[0], __shfl_xor_sync(kFullWarp, values[0], 1));
}

__device__ inline int larger_magnitude(int a, int b) { return max(a, b); }
__device__ inline uint32_t added(uint32_t a, uint32_t b) { return a + b; }

// The bits of the largest magnitude of group_of_lane().
__device__ inline int largest_of_groups(const RowEntries& x) {
  int tops[kRowVectors];
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
    tops[v] = magnitude_bits(x[v][0]);
#pragma unroll
    for (int e = 1; e < kVectorElements; ++e) tops[v] = max(tops[v], magnitude_bits(x[v][e]));
  }
  return reduce_groups(tops, larger_magnitude);
}

// A group with a non-finite entry is not sent. Replaces the entries of such a group with the old
// residual. The codes of the group will be 0, so the residual keeps its value. This is rare.
__device__ inline void keep_old(RowEntries& x, bool sent, const OldResidual& old) {
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
    if (of_vector(static_cast<int>(sent), v) != 0) continue;
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) x[v][e] = old(v, e);
  }
}

// Computes the ternary bound of group_of_lane(), up to which a magnitude becomes 0. Returns the
// mean of the magnitudes above the bound, in units.
__device__ inline float mean_of_kept(const RowEntries& x, float inverse_unit, float& bound) {
  uint32_t totals[kRowVectors], kept[kRowVectors];
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
    totals[v] = 0;
    const float factor = of_vector(inverse_unit, v);
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      totals[v] += unit_bits(fabsf(__fmul_rn(x[v][e], factor)));
    }
  }
  // Exact, because kScaled is a power of two.
  constexpr float kShare = 1.0f / kScaled;
  const uint32_t total = reduce_groups(totals, added) - uint32_t{kScaled} * kUnitBitsOfZero;
  bound = __fmul_rn(0.75f, __fmul_rn(static_cast<float>(total), kShare));
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
    totals[v] = kept[v] = 0;
    const float factor = of_vector(inverse_unit, v), bound_of_vector = of_vector(bound, v);
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      const float magnitude = fabsf(__fmul_rn(x[v][e], factor));
      if (!(magnitude > bound_of_vector)) continue;
      totals[v] += unit_bits(magnitude);
      ++kept[v];
    }
  }
  const uint32_t count = reduce_groups(kept, added);
  return mean_of(reduce_groups(totals, added) - count * kUnitBitsOfZero, count);
}

// Stores int8 or int4 codes. For int4, pairs of lanes combine their halves of a 32-bit word.
template <PayloadFormat kFormat>
__device__ void store_integers(RowEntries& x, float factor, float scale, uint8_t* out) {
  constexpr int kBits = kFormat == PayloadFormat::kInt8 ? 8 : 4;
  uint32_t words[kRowVectors];
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
    const float factor_of_vector = of_vector(factor, v), scale_of_vector = of_vector(scale, v);
    words[v] = 0;
#pragma unroll
    for (int e = kVectorElements - 1; e >= 0; --e) {
      const float rounded = __fadd_rn(__fmul_rn(x[v][e], factor_of_vector), kRoundToInteger);
      words[v] = words[v] << kBits | (float_to_bits(rounded) & ((1 << kBits) - 1));
      const float code = __fsub_rn(rounded, kRoundToInteger);
      x[v][e] = __fsub_rn(x[v][e], __fmul_rn(code, scale_of_vector));
    }
  }
  const int lane = lane_index();
  if constexpr (kFormat == PayloadFormat::kInt8) {
#pragma unroll
    for (int v = 0; v < kRowVectors; ++v) {
      __stcs(reinterpret_cast<uint32_t*>(out + column_of(v)), words[v]);
    }
  } else {
    const bool odd = lane % 2 != 0;
#pragma unroll
    for (int v = 0; v < kRowVectors; v += 2) {
      const uint32_t other = __shfl_xor_sync(kFullWarp, odd ? words[v] : words[v + 1], 1);
      const uint32_t word = odd ? other | words[v + 1] << 16 : words[v] | other << 16;
      const int column = (v + odd) * kWarpVector + lane / 2 * 8;
      __stcs(reinterpret_cast<uint32_t*>(out + column / 2), word);
    }
  }
}

// A trit is a ternary code plus 1. The byte of five trits: four, one in each byte of a word, and a
// fifth. It is the base-3 number with these digits, minus 11111 in base 3 (kFiveOnes). The top byte
// of the product is the number with the four digits, and no other byte carries into it.
constexpr uint32_t kPlaces = 1 << 24 | 3 << 16 | 9 << 8 | 27, kFifthPlace = 81, kFiveOnes = 121;
DCT_HOST_DEVICE constexpr uint8_t ternary_byte(uint32_t four, uint32_t fifth) {
  return static_cast<uint8_t>((four * kPlaces >> 24) + kFifthPlace * fifth - kFiveOnes);
}
constexpr bool is_right_ternary_byte(uint32_t number) {
  return ternary_byte(
             number % 3 | number / 3 % 3 << 8 | number / 9 % 3 << 16 | number / 27 % 3 << 24,
             number / 81) == static_cast<uint8_t>(number - kFiveOnes) &&
         (number == 0 || is_right_ternary_byte(number - 1));
}
static_assert(is_right_ternary_byte(242));

// The byte of the five trits that begin at byte `first` of two words.
__device__ inline uint8_t ternary_byte(uint32_t low, uint32_t high, uint32_t first) {
  const uint32_t four = __byte_perm(low, high, 0x3210 + first * 0x1111);
  return ternary_byte(four, high >> 8 * first & 255);
}

// Writes ternary codes to `staged`. Five entries share a byte, and two neighboring lanes hold them.
// A lane packs one of the 13 bytes of a group. Trits are 0 to 2 here.
__device__ inline void stage_ternary(RowEntries& x, float inverse_unit, float bound, float scale,
                                     uint8_t* staged) {
  const int lane = lane_index() % kHalfWarp, half = lane_index() / kHalfWarp;
  const int first = lane * 5 / kVectorElements;  // the lane that has the byte's first entry
  constexpr uint32_t kZeros = 0x01010101;
  constexpr int kGroupBytes = scaled_code_bytes(PayloadFormat::kTernary);
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
    const float factor_of_vector = of_vector(inverse_unit, v),
                bound_of_vector = of_vector(bound, v), scale_of_vector = of_vector(scale, v);
    uint32_t trits = 0;
#pragma unroll
    for (int e = kVectorElements - 1; e >= 0; --e) {
      const float scaled = __fmul_rn(x[v][e], factor_of_vector);
      const bool above = scaled > bound_of_vector, below = scaled < -bound_of_vector;
      trits = trits << 8 | (above ? 2 : below ? 0 : 1);
      x[v][e] = __fsub_rn(x[v][e], above ? scale_of_vector : below ? -scale_of_vector : 0.0f);
    }
    const uint32_t low = __shfl_sync(kFullWarp, trits, first, kHalfWarp);
    const uint32_t next = __shfl_sync(kFullWarp, trits, first + 1, kHalfWarp);
    const uint32_t high = first + 1 < kHalfWarp ? next : kZeros;  // past the 64 entries
    const uint8_t byte = ternary_byte(low, high, lane * 5 % kVectorElements);
    if (lane < kGroupBytes) {
      staged[(2 * v + half) * kGroupBytes + lane] = byte;
    }
  }
}

// Quantizes to a format with scales. Returns whether any group is not sent.
template <PayloadFormat kFormat>
__device__ bool quantize_groups(RowEntries& x, const OldResidual& old, uint8_t* out,
                                uint8_t* staged) {
  constexpr RowFormat kRowFormat = row_format(kFormat);
  constexpr bool kTernary = kFormat == PayloadFormat::kTernary;
  const int top = largest_of_groups(x);
  RowQuantizer group(kRowFormat, top, 0.0f);
  float bound = 0.0f;  // for ternary: magnitudes up to this become 0
  const bool sent = top < static_cast<int>(kFloat32Infinity);
  const bool lost = __any_sync(kFullWarp, !sent) != 0;
  if (lost) keep_old(x, sent, old);
  if constexpr (kTernary) {
    const float mean = mean_of_kept(x, units_of(top).inverse_unit, bound);
    group = RowQuantizer(kRowFormat, top, mean);
  }
  const bool has_codes = sent && group.usable;  // or all codes are 0
  const float scale = has_codes ? to_float(group.scale) : 0.0f;
  const uint16_t scale_bits = sent ? group.scale.bits : kNanScale.bits;
  uint8_t* const scales = (kTernary ? staged : out) + row_code_bytes(kFormat);
  if (lane_index() % 2 == 0) reinterpret_cast<uint16_t*>(scales)[group_of_lane()] = scale_bits;
  if constexpr (kTernary) {
    if (!has_codes) bound = bits_to_float(kFloat32Infinity);
    stage_ternary(x, group.factor, bound, scale, staged);
    __syncwarp();
    for (int i = lane_index() * 16; i < row_bytes(kFormat); i += kWarpSize * 16) {
      __stcs(reinterpret_cast<uint4*>(out + i), *reinterpret_cast<const uint4*>(staged + i));
    }
    __syncwarp();
  } else {
    store_integers<kFormat>(x, has_codes ? group.factor : 0.0f, scale, out);
  }
  return lost;
}

// Rounds to float32 or bfloat16, which have no scales. Returns whether any entry is not finite.
template <typename Value>
__device__ bool round_entries(RowEntries& x, const OldResidual& old, uint8_t* out) {
  bool finite = true;
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
    Value sent[kVectorElements];
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      sent[e] = round_saturating<Value>(x[v][e]);
      x[v][e] = __fsub_rn(x[v][e], to_float(sent[e]));  // a NaN where x is not finite
      finite &= is_finite(x[v][e]);
    }
    stream_out(reinterpret_cast<Value*>(out) + column_of(v), sent);
  }
  const bool lost = __any_sync(kFullWarp, !finite) != 0;
  if (!lost) return false;
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      if (!is_finite(x[v][e])) x[v][e] = old(v, e);
    }
  }
  return true;
}

// Packs a row of sums `x`, which are 0 past the range, into the payload. `x` becomes the new
// residual. Sets the non-finite flag in the header if an entry is not finite. By one warp.
template <PayloadFormat kFormat>
__device__ void pack_row(RowEntries& x, const OldResidual& old, uint8_t* payload, int64_t row,
                         uint8_t* staged) {
  uint8_t* const out = payload + sizeof(PayloadHeader) + row * row_bytes(kFormat);
  bool lost;
  if constexpr (has_scales(kFormat)) {
    lost = quantize_groups<kFormat>(x, old, out, staged);
  } else if constexpr (kFormat == PayloadFormat::kBFloat16) {
    lost = round_entries<BFloat16>(x, old, out);
  } else {
    lost = round_entries<float>(x, old, out);
  }
  if (!lost || lane_index() != 0) return;
  static_assert(offsetof(PayloadHeader, flags) == 7, "the highest byte of the second word");
  atomicOr(reinterpret_cast<uint32_t*>(payload) + 1, uint32_t{kFlagNonFinite} << 24);
}

}  // namespace dct::cuda
