// A row takes several passes: one for its largest magnitude, one for each sum, one for its codes.
// Each pass depends on the result of the previous pass. To hide the latency, several short rows
// take a pass together. After the first pass, short rows are in the L1 cache.

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "../common/row_layout.h"
#include "kernels.h"
#include "magnitudes.h"
#include "pack_codes.h"
#include "row_positions.h"
#include "streaming.h"

namespace dct::cpu {
namespace {

constexpr int64_t kMostRows = 16;    // maximum rows that take passes together
constexpr int64_t kTogether = 1024;  // maximum columns in these rows, unless one row is wider

constexpr int64_t rows_together(int64_t width) {
  return std::clamp<int64_t>(kTogether / width, 1, kMostRows);
}

const float* as_floats(const float* x, int64_t, float*) { return x; }

template <typename X>
const float* as_floats(const X* x, int64_t n, float* floats) {
  for (int64_t i = 0; i < n; ++i) floats[i] = to_float(x[i]);
  return floats;
}

// Calls function(x, n, i) for the columns of a row: first for all whole steps, then for the rest,
// followed by zeros. `i` is the first of the n columns.
template <typename Function>
void for_each_part(const float* x, int64_t width, Function&& function) {
  const int64_t whole = width / kStep * kStep;
  if (whole > 0) function(x, whole, 0);
  if (whole == width) return;
  float rest[kStep];
  for (int64_t i = 0; i < kStep; ++i) rest[i] = whole + i < width ? x[whole + i] : 0.0f;
  function(rest, kStep, whole);
}

bool is_finite(int32_t key) { return key < static_cast<int32_t>(kFloat32Infinity); }

int32_t top_of(const float* x, int64_t width) {
  int32_t top = 0;
  for_each_part(x, width, [&](const float* part, int64_t n, int64_t) {
    top = std::max(top, largest_key(part, n));
  });
  return top;
}

// The scale before rounding, of a row whose largest key is `top`.
template <RowFormat kFormat>
float exact_scale(const float* x, int64_t width, int32_t top) {
  if constexpr (kFormat == RowFormat::kSign) {
    const Units units = units_of(top);
    int64_t total = 0;
    for_each_part(x, width, [&](const float* part, int64_t n, int64_t) {
      total += sum_magnitudes(part, n, units.inverse_unit);
    });
    return mean(total, width) * units.unit;
  } else {
    return bits_to_float(top) / levels(kFormat);
  }
}

// Writes the codes of kStep columns.
template <RowFormat kFormat, typename Pack>
void write_step(Pack, const float* x, float inverse, uint8_t* out) {
  if constexpr (kFormat == RowFormat::kSign) {
    store_uint16(out, Pack::negative(x));
  } else if constexpr (kFormat == RowFormat::kInt8) {
    Pack::codes(x, inverse, out);
  } else {
    uint8_t codes[kStep];
    Pack::codes(x, inverse, codes);
    Pack::nibbles(codes, out);
  }
}

// Writes the codes of a row, in whole steps unless they would cross the end of the task's rows.
// Later writes replace the excess.
template <RowFormat kFormat, typename Pack>
void write_codes(Pack how, const float* x, int64_t width, float inverse, uint8_t* out,
                 const uint8_t* end) {
  constexpr int kCodesPerByte = codes_per_byte(kFormat);
  for_each_part(x, width, [&](const float* part, int64_t n, int64_t begin) {
    uint8_t last[kStep];
    uint8_t* codes = out + begin / kCodesPerByte;
    uint8_t* to = end - codes >= n / kCodesPerByte ? codes : last;
    for (int64_t i = 0; i < n; i += kStep) {
      write_step<kFormat>(how, part + i, inverse, to + i / kCodesPerByte);
    }
    if (to == last) std::memcpy(codes, last, code_bytes(width - begin, kFormat));
  });
}

// Quantizes up to rows_together(width) rows. Meanwhile it prefetches the rows from `next` on. It
// writes nothing at or past `end`.
template <RowFormat kFormat, typename Pack, typename X>
void quantize_together(Pack how, const float* x, int64_t count, int64_t width,
                       const Prefetch<X>& prefetch, int64_t next, uint8_t* out,
                       const uint8_t* end) {
  const int64_t bytes = code_bytes(width, kFormat);
  int32_t top[kMostRows] = {};
  float scale[kMostRows] = {}, inverse[kMostRows];
  BFloat16 rounded[kMostRows];
  for (int64_t r = 0; r < count; ++r) top[r] = top_of(x + r * width, width);
  for (int64_t r = 0; r < count; ++r) {
    if (is_finite(top[r])) scale[r] = exact_scale<kFormat>(x + r * width, width, top[r]);
  }
  for (int64_t r = 0; r < kMostRows; ++r) {
    rounded[r] = row_scale(scale[r]);
    inverse[r] = 1.0f / to_float(rounded[r]);
  }
  for (int64_t r = 0; r < count; ++r, out += bytes + kScaleBytes) {
    prefetch.before(next + r);
    if (!is_finite(top[r])) rounded[r] = kNanScale;
    if (rounded[r].bits == 0 || !is_finite(top[r])) {
      std::memset(out, 0, bytes);
    } else {
      write_codes<kFormat>(how, x + r * width, width, inverse[r], out, end);
    }
    std::memcpy(out + bytes, &rounded[r], kScaleBytes);
  }
}

template <typename X, RowFormat kFormat>
void quantize_rows(const RowQuantizeArgs& args, const Parallel& parallel) {
  const auto* x = static_cast<const X*>(args.x);
  const int64_t width = args.width, bytes = row_bytes(width, kFormat);
  const int64_t tasks = std::min(parallel.threads, args.rows);
  std::vector<std::unique_ptr<float[]>> scratch(tasks);  // rows in float32
  for (auto& floats : scratch) floats.reset(new float[rows_together(width) * width]);
  parallel.run(tasks, [&](int64_t task) {
    const Share span = share(args.rows, tasks, task);
    const Prefetch<X> prefetch(x, width, span.end);
    vectorize_packing([&](auto how) {
      int64_t count;
      for (int64_t row = span.begin; row < span.end; row += count) {
        count = std::min(span.end - row, rows_together(width));
        const float* floats = as_floats(x + row * width, count * width, scratch[task].get());
        quantize_together<kFormat>(how, floats, count, width, prefetch, row + count,
                                   args.out + row * bytes, args.out + span.end * bytes);
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
