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
#include "streaming.h"

namespace dct::cpu {
namespace {

constexpr int64_t kMostRows = 16;    // maximum rows that take passes together
constexpr int64_t kTogether = 1024;  // maximum columns in these rows, unless one row is wider
constexpr int64_t kWord = 64;        // columns per word of bits

constexpr int64_t rows_together(int64_t width) {
  return std::clamp<int64_t>(kTogether / width, 1, kMostRows);
}

// Working memory of one task, for rows of `width` columns.
struct Scratch {
  explicit Scratch(int64_t width)
      : floats(new float[rows_together(width) * width]), codes(new uint8_t[width + 1]) {}
  std::unique_ptr<float[]> floats;   // float32 copies of rows of a narrower dtype
  std::unique_ptr<uint8_t[]> codes;  // for int4, one per byte
};

struct Row {
  const float* x;
  int32_t top;  // the key of its largest magnitude
  BFloat16 scale;

  bool finite() const { return top < static_cast<int32_t>(kFloat32Infinity); }
};

const float* as_floats(const float* x, int64_t, float*) { return x; }

template <typename X>
const float* as_floats(const X* x, int64_t width, float* floats) {
  for (int64_t i = 0; i < width; ++i) floats[i] = to_float(x[i]);
  return floats;
}

// Calls function(word, bits) for 64 columns of a row at a time. A bit is set if the column is
// negative. Bits past the last column are 0.
template <typename Pack, typename Function>
void for_each_word(Pack, const float* x, int64_t width, Function&& function) {
  uint64_t above, below;
  int64_t word = 0;
  for (; (word + 1) * kWord <= width; ++word) {
    Pack::mark(x + word * kWord, 1.0f, 0.0f, &above, &below);
    function(word, below);
  }
  const int64_t rest = width - word * kWord;
  if (rest == 0) return;
  float last[kWord] = {};
  std::memcpy(last, x + word * kWord, rest * sizeof(float));
  Pack::mark(last, 1.0f, 0.0f, &above, &below);
  function(word, below);
}

// Writes a whole vector, although only `bytes` bytes are needed, unless the vector crosses the end
// of the task's rows. Later writes replace the excess.
template <typename Vector>
void put(uint8_t* out, const Vector& vector, int64_t bytes, const uint8_t* end) {
  if (end - out >= static_cast<int64_t>(sizeof(vector))) {
    std::memcpy(out, &vector, sizeof(vector));
  } else {
    std::memcpy(out, &vector, bytes);
  }
}

// Packs two codes in two's complement per byte, the first one in the low half.
void pack_nibbles(const uint8_t* codes, int64_t bytes, uint8_t* out) {
  for (int64_t i = 0; i < bytes; ++i) {
    out[i] = static_cast<uint8_t>((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
  }
}

// The scale before rounding.
template <RowFormat kFormat>
float exact_scale(const Row& row, int64_t width) {
  if constexpr (kFormat == RowFormat::kSign) {
    const Units units = units_of(row.top);
    return mean(sum_magnitudes(row.x, width, units.inverse_unit), width) * units.unit;
  } else {
    return bits_to_float(row.top) / levels(kFormat);
  }
}

template <RowFormat kFormat, typename Pack>
void write_row(Pack how, const Row& row, int64_t width, uint8_t* codes, uint8_t* out,
               const uint8_t* end) {
  const int64_t bytes = code_bytes(width, kFormat);
  if (row.scale.bits == 0 || !row.finite()) {
    std::memset(out, 0, bytes);
  } else if constexpr (kFormat == RowFormat::kSign) {
    for_each_word(how, row.x, width, [&](int64_t word, uint64_t bits) {
      put(out + 8 * word, bits, bytes - 8 * word, end);
    });
  } else {
    const float inverse = 1.0f / to_float(row.scale);
    uint8_t* target = kFormat == RowFormat::kInt8 ? out : codes;
    for (int64_t i = 0; i < width; ++i) {
      target[i] = static_cast<uint8_t>(float_to_bits(row.x[i] * inverse + kRoundToInteger));
    }
    if constexpr (kFormat == RowFormat::kInt4) {
      codes[width] = 0;  // the second code of a last byte with only one column
      pack_nibbles(codes, bytes, out);
    }
  }
  std::memcpy(out + bytes, &row.scale, kScaleBytes);
}

// Quantizes up to rows_together(width) rows. Meanwhile it prefetches the rows from `next` on. It
// writes nothing at or past `end`.
template <RowFormat kFormat, typename Pack, typename X>
void quantize_together(Pack how, const X* x, int64_t count, int64_t width, const Scratch& scratch,
                       const Prefetch<X>& prefetch, int64_t next, uint8_t* out,
                       const uint8_t* end) {
  Row rows[kMostRows];
  for (int64_t r = 0; r < count; ++r) {
    const float* floats = as_floats(x + r * width, width, scratch.floats.get() + r * width);
    rows[r] = {floats, largest_key(floats, width), kNanScale};
  }
  for (int64_t r = 0; r < count; ++r) {
    if (rows[r].finite()) rows[r].scale = row_scale(exact_scale<kFormat>(rows[r], width));
  }
  for (int64_t r = 0; r < count; ++r) {
    prefetch.before(next + r);
    write_row<kFormat>(how, rows[r], width, scratch.codes.get(),
                       out + r * row_bytes(width, kFormat), end);
  }
}

template <typename X, RowFormat kFormat>
void quantize_rows(const RowQuantizeArgs& args, const Parallel& parallel) {
  const auto* x = static_cast<const X*>(args.x);
  const int64_t width = args.width, bytes = row_bytes(width, kFormat);
  const int64_t tasks = std::min(parallel.threads, args.rows);
  std::vector<Scratch> scratch;
  scratch.reserve(tasks);
  for (int64_t task = 0; task < tasks; ++task) scratch.emplace_back(width);
  parallel.run(tasks, [&](int64_t task) {
    const Share span = share(args.rows, tasks, task);
    const Scratch& task_scratch = scratch[task];
    const Prefetch<X> prefetch(x, width, span.end);
    vectorize_packing([&](auto how) {
      int64_t count;
      for (int64_t row = span.begin; row < span.end; row += count) {
        count = std::min(span.end - row, rows_together(width));
        quantize_together<kFormat>(how, x + row * width, count, width, task_scratch, prefetch,
                                   row + count, args.out + row * bytes,
                                   args.out + span.end * bytes);
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
