#pragma once

// Quantizes a row of 1,024 accumulated entries and computes the new residual. A row takes several
// passes over memory in the L1 cache. Between the passes, the 16 scales of the row are computed
// together, which hides their latency.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "../common/quantized_payload.h"
#include "magnitudes.h"
#include "pack_codes.h"

namespace dct::cpu {

// Working memory for one row.
struct alignas(64) RowScratch {
  float acc[kRow];
  float residual[kRow];  // used if the row is not whole, or there is no residual
  float old[kRow];       // the old residual, if some of it must be kept
  int32_t top[kScales];  // keys of the largest magnitude per group
  float scale[kScales], inverse[kScales];
  float inverse_unit[kScales], unit[kScales], bound[kScales];  // for ternary
  uint64_t above[kScales + 1], below[kScales + 1];             // bit planes
  uint8_t codes[kScaled];                                      // for int4, one per byte
};

inline void integer_scales(RowScratch& row, float levels) {
  for (int64_t g = 0; g < kScales; ++g) {
    row.scale[g] = to_float(row_scale(bits_to_float(row.top[g]) / levels));
    row.inverse[g] = row.scale[g] > 0 ? 1.0f / row.scale[g] : 0.0f;
  }
}

// Also computes the bit planes of the entries above the bound and below its negative.
template <typename Pack>
void ternary_scales(Pack, RowScratch& row) {
  int64_t total[kScales], kept[kScales];
  for (int64_t g = 0; g < kScales; ++g) {
    const Units units = units_of(row.top[g]);
    row.inverse_unit[g] = units.inverse_unit;
    row.unit[g] = units.unit;
  }
  for (int64_t g = 0; g < kScales; ++g) {
    const float* x = row.acc + g * kScaled;
    total[g] = sum_magnitudes(x, kScaled, row.inverse_unit[g]);
  }
  for (int64_t g = 0; g < kScales; ++g) {
    row.bound[g] = 0.75f * mean(total[g], kScaled);
  }
  for (int64_t g = 0; g < kScales; ++g) {
    const float* x = row.acc + g * kScaled;
    total[g] = Pack::mark(x, row.inverse_unit[g], row.bound[g], &row.above[g], &row.below[g]);
    kept[g] = std::max(__builtin_popcountll(row.above[g] | row.below[g]), 1);
  }
  for (int64_t g = 0; g < kScales; ++g) {
    row.scale[g] = to_float(row_scale(mean(total[g], kept[g]) * row.unit[g]));
  }
  for (int64_t g = 0; g < kScales; ++g) {
    if (row.scale[g] == 0.0f) row.above[g] = row.below[g] = 0;
  }
}

template <PayloadFormat kFormat>
void write_integers(RowScratch& row, int64_t g, uint8_t* out, float* residual) {
  const float* acc = row.acc + g * kScaled;
  const float scale = row.scale[g], inverse = row.inverse[g];
  uint8_t* codes = kFormat == PayloadFormat::kInt8 ? out : row.codes;
  for (int64_t i = 0; i < kScaled; ++i) {
    const float shifted = acc[i] * inverse + kRoundToInteger;
    codes[i] = static_cast<uint8_t>(float_to_bits(shifted));
    residual[i] = acc[i] - (shifted - kRoundToInteger) * scale;
  }
  if constexpr (kFormat == PayloadFormat::kInt4) {
    uint16_t pairs[kScaled / 2];
    std::memcpy(pairs, codes, sizeof(pairs));
    for (int64_t i = 0; i < kScaled / 2; ++i) {
      out[i] = static_cast<uint8_t>((pairs[i] & 15) | (pairs[i] >> 4 & 0xf0));
    }
  }
}

template <typename Pack>
void write_ternary(Pack, RowScratch& row, int64_t g, uint8_t* out, float* residual) {
  const float* acc = row.acc + g * kScaled;
  const float scale = row.scale[g], inverse_unit = row.inverse_unit[g], bound = row.bound[g];
  for (int64_t i = 0; i < kScaled; ++i) {
    const bool kept = std::fabs(acc[i]) * inverse_unit > bound;
    residual[i] = acc[i] - (kept ? std::copysign(scale, acc[i]) : 0.0f);
  }
  uint8_t plane[2][kTritPlane] = {};
  std::memcpy(plane[0], &row.above[g], sizeof(uint64_t));
  std::memcpy(plane[1], &row.below[g], sizeof(uint64_t));
  Pack::pack_trits(plane[0], plane[1], out);  // the next write replaces the last three bytes
}

// For float32 and bfloat16, which have no scales. Each value may be non-finite.
template <typename Value>
bool write_values(const RowScratch& row, uint8_t* out, float* residual) {
  auto* values = reinterpret_cast<Value*>(out);  // rows are aligned to 16 bytes
  int32_t top = 0;
  for (int64_t i = 0; i < kRow; ++i) {
    const float acc = row.acc[i], old = finite_or_zero(residual[i]);
    const int32_t magnitude = magnitude_bits(acc);
    top = magnitude > top ? magnitude : top;
    values[i] = round_saturating<Value>(acc);
    residual[i] = is_finite(acc) ? acc - to_float(values[i]) : old;
  }
  return top < static_cast<int32_t>(kFloat32Infinity);
}

// Quantizes row.acc, which it may change. Replaces the old `residual` [kRow] by the new one.
// Returns whether all entries of row.acc were finite.
template <PayloadFormat kFormat, typename Pack>
bool quantize_row(Pack how, RowScratch& row, float* residual, uint8_t* out) {
  if constexpr (kFormat == PayloadFormat::kFloat32) {
    return write_values<float>(row, out, residual);
  } else if constexpr (kFormat == PayloadFormat::kBFloat16) {
    return write_values<BFloat16>(row, out, residual);
  } else {
    constexpr RowFormat kRowFormat = row_format(kFormat);
    constexpr int64_t kBytes = scaled_code_bytes(kFormat);
    for (int64_t g = 0; g < kScales; ++g) row.top[g] = largest_key(row.acc + g * kScaled, kScaled);
    bool lost[kScales], any_lost = false;
    for (int64_t g = 0; g < kScales; ++g) {
      lost[g] = row.top[g] >= static_cast<int32_t>(kFloat32Infinity);
      any_lost |= lost[g];
    }
    if (any_lost) {
      std::memcpy(row.old, residual, sizeof(row.old));
      for (int64_t g = 0; g < kScales; ++g) {
        if (!lost[g]) continue;
        std::memset(row.acc + g * kScaled, 0, kScaled * sizeof(float));
        row.top[g] = 0;
      }
    }
    if constexpr (kFormat == PayloadFormat::kTernary) {
      ternary_scales(how, row);
    } else {
      integer_scales(row, levels(kRowFormat));
    }
    for (int64_t g = 0; g < kScales; ++g) {
      if constexpr (kFormat == PayloadFormat::kTernary) {
        write_ternary(how, row, g, out + g * kBytes, residual + g * kScaled);
      } else {
        write_integers<kFormat>(row, g, out + g * kBytes, residual + g * kScaled);
      }
    }
    BFloat16 scales[kScales];
    for (int64_t g = 0; g < kScales; ++g) {
      const auto bits = static_cast<uint16_t>(float_to_bits(row.scale[g]) >> 16);
      scales[g].bits = lost[g] ? kNanScale.bits : bits;
    }
    std::memcpy(out + row_code_bytes(kFormat), scales, sizeof(scales));
    for (int64_t i = 0; i < kRow && any_lost; ++i) {
      if (lost[i / kScaled]) residual[i] = finite_or_zero(row.old[i]);
    }
    return !any_lost;
  }
}

inline void say_non_finite(uint8_t* payload) {
  uint8_t* flags = payload + offsetof(PayloadHeader, flags);
  __atomic_fetch_or(flags, kFlagNonFinite, __ATOMIC_RELAXED);
}

}  // namespace dct::cpu
