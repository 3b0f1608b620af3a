// A row is gone through a few times: for its largest magnitude, for the sums that means need, for
// its codes, one a byte, and for packing those. After the first time it is in the nearest cache.

#include "row_quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "../common/row_formats.h"
#include "mxfp4.h"
#include "prefetch.h"
#include "vectorise.h"

namespace dct::cpu {
namespace {

constexpr int64_t kSpareCodes = 16;  // a last byte filled up, and read by 8 bytes at a time

// One task's working memory, for rows of `width` columns.
struct Scratch {
  explicit Scratch(int64_t width)
      : row(new float[width]), codes(new uint8_t[width + kSpareCodes]()) {}
  std::unique_ptr<float[]> row;      // of a narrower dtype, in float32
  std::unique_ptr<uint8_t[]> codes;  // of every column, and some bytes more
};

const float* as_floats(const float* x, int64_t, const Scratch&) { return x; }

template <typename X>
const float* as_floats(const X* x, int64_t width, const Scratch& scratch) {
  for (int64_t i = 0; i < width; ++i) scratch.row[i] = to_float(x[i]);
  return scratch.row.get();
}

int32_t largest_key(const float* x, int64_t width) {
  int32_t top = 0;
  for (int64_t i = 0; i < width; ++i) {
    const int32_t magnitude = float_to_bits(x[i]) & 0x7fffffff;
    top = magnitude > top ? magnitude : top;
  }
  return top;
}

// The mean of the magnitudes, in units: of all of them, or with kBound of those above the bound.
template <bool kBound>
float mean_magnitude(const float* x, int64_t width, float in_one, float bound) {
  int64_t total = 0, kept = kBound ? 0 : width;
  for (int64_t begin = 0; begin < width; begin += kUnitsInWord) {
    const int64_t n = std::min(width - begin, kUnitsInWord);
    uint32_t units = 0, above = 0;
    for (int64_t i = 0; i < n; ++i) {
      const float magnitude = std::fabs(x[begin + i]) * in_one;
      const uint32_t whole = static_cast<uint32_t>(static_cast<int32_t>(magnitude));
      units += kBound && !(magnitude > bound) ? 0 : whole;
      if constexpr (kBound) above += magnitude > bound;
    }
    total += units;
    kept += above;
  }
  return static_cast<float>(total) / static_cast<float>(kept > 0 ? kept : 1);
}

// Fills up the codes of a row's last byte: a store of fixed size, where memset would be called.
void fill_last(uint8_t* codes, uint8_t code) {
  const uint64_t eight = 0x0101010101010101u * code;
  std::memcpy(codes, &eight, sizeof(eight));
}

// Of flags, which are 0 or 1.
void pack_signs(const uint8_t* flags, int64_t bytes, uint8_t* out) {
  for (int64_t i = 0; i < bytes; ++i) {
    uint64_t eight;
    std::memcpy(&eight, flags + 8 * i, sizeof(eight));
    // Each is shifted to its own bit of the product's top byte.
    out[i] = static_cast<uint8_t>(eight * 0x0102040810204080u >> 56);
  }
}

// Of codes in two's complement, the first of two in the low half.
void pack_nibbles(const uint8_t* codes, int64_t bytes, uint8_t* out) {
  for (int64_t i = 0; i < bytes; ++i) {
    out[i] = static_cast<uint8_t>((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
  }
}

// Digits are codes + 1; the byte is the sum of the codes times 1, 3, 9, 27, 81.
void pack_trits(const uint8_t* digits, int64_t bytes, uint8_t* out) {
  constexpr uint64_t kPowers = 81 | 27 << 8 | 9 << 16 | 3 << 24 | uint64_t{1} << 32;
  for (int64_t i = 0; i < bytes; ++i) {
    uint64_t five;
    std::memcpy(&five, digits + 5 * i, sizeof(five));
    // Digit j times 3^j adds up in byte 4 of the product; the bytes below stay below 256.
    out[i] = static_cast<uint8_t>((five * kPowers >> 32) - 121);
  }
}

// A row whose codes are all 0.
void write_zeros(uint8_t* out, int64_t bytes, BFloat16 scale) {
  std::memset(out, 0, bytes);
  std::memcpy(out + bytes, &scale, kScaleBytes);
}

template <RowFormat kFormat>
void quantize_row(const float* x, int64_t width, const Scratch& scratch, uint8_t* out) {
  if constexpr (kFormat == RowFormat::kMxfp4) return quantize_mxfp4(x, width, out);
  const int64_t bytes = code_bytes(width, kFormat);
  uint8_t* codes = scratch.codes.get();
  const int32_t top = largest_key(x, width);
  if (top >= static_cast<int32_t>(kFloat32Infinity)) return write_zeros(out, bytes, kNanScale);
  const Units units = units_of(top);
  float bound = 0.0f, exact = 0.0f;  // in units: only above the bound is not 0
  if constexpr (kFormat == RowFormat::kTernary) {
    bound = 0.75f * mean_magnitude<false>(x, width, units.in_one, 0.0f);
    exact = mean_magnitude<true>(x, width, units.in_one, bound) * units.unit;
  } else if constexpr (kFormat == RowFormat::kSign) {
    exact = mean_magnitude<false>(x, width, units.in_one, 0.0f) * units.unit;
  } else {
    exact = bits_to_float(top) / levels(kFormat);
  }
  const BFloat16 scale = row_scale(exact);
  if (scale.bits == 0) return write_zeros(out, bytes, scale);
  std::memcpy(out + bytes, &scale, kScaleBytes);
  if constexpr (kFormat == RowFormat::kSign) {
    for (int64_t i = 0; i < width; ++i) {
      const uint32_t bits = float_to_bits(x[i]);
      codes[i] = static_cast<uint8_t>((bits & (bits - 1)) >> 31);  // x < 0: not of -0.0
    }
    fill_last(codes + width, 0);
    pack_signs(codes, bytes, out);
  } else if constexpr (kFormat == RowFormat::kTernary) {
    for (int64_t i = 0; i < width; ++i) {
      const float in_units = x[i] * units.in_one;
      codes[i] = static_cast<uint8_t>(1 + (in_units > bound) - (in_units < -bound));
    }
    fill_last(codes + width, 1);
    pack_trits(codes, bytes, out);
  } else {
    const float inverse = 1.0f / to_float(scale);
    uint8_t* target = kFormat == RowFormat::kInt8 ? out : codes;
    for (int64_t i = 0; i < width; ++i) {
      target[i] = static_cast<uint8_t>(float_to_bits(x[i] * inverse + kRoundToInteger));
    }
    if constexpr (kFormat == RowFormat::kInt4) {
      fill_last(codes + width, 0);
      pack_nibbles(codes, bytes, out);
    }
  }
}

template <typename X, RowFormat kFormat>
void quantize_rows(const RowQuantizeArgs& args, const Parallel& parallel) {
  const auto* x = static_cast<const X*>(args.x);
  const int64_t width = args.width, bytes = row_bytes(width, kFormat);
  const int64_t tasks = std::min(parallel.threads, args.rows);
  std::vector<Scratch> scratch;
  for (int64_t task = 0; task < tasks; ++task) scratch.emplace_back(width);
  parallel.run(tasks, [&](int64_t task) {
    const Share mine = share(args.rows, tasks, task);
    const Scratch& own = scratch[task];
    const Prefetch<X> prefetch(x, width, mine.end);
    vectorise([&] {
      for (int64_t row = mine.begin; row < mine.end; ++row) {
        prefetch.before(row);
        const float* floats = as_floats(x + row * width, width, own);
        quantize_row<kFormat>(floats, width, own, args.out + row * bytes);
      }
    });
  });
}

}  // namespace

void row_quantize(const RowQuantizeArgs& args, const Parallel& parallel) {
  dispatch(args.x_dtype, [&](auto x) {
    dispatch(args.format, [&](auto format) {
      quantize_rows<decltype(x), decltype(format)::value>(args, parallel);
    });
  });
}

}  // namespace dct::cpu
