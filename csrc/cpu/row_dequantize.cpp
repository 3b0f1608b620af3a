// Dequantizes rows piece by piece. A code of int4 or sign is an index into a table of entries. In
// narrow rows, computing this table would take longer than multiplying by the scale.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../common/row_layout.h"
#include "kernels.h"
#include "streaming.h"
#include "unpack_codes.h"

namespace dct::cpu {
namespace {

constexpr int64_t kPiece = 256;  // columns; a multiple of kCodeGroup
constexpr int64_t kNarrow = 64;  // the maximum width of narrow rows

// Lookup tables are built for several rows together. A wide load directly after the narrow stores
// that it covers would stall on store forwarding.
constexpr int64_t kRows = 16;

// An entry of a narrower dtype occupies the low bits of a float. A lookup only copies bits.
inline float in_low_bits(float x) { return x; }
template <typename Out>
float in_low_bits(Out x) {
  return bits_to_float(x.bits);
}

// Looks up the entries of a whole group.
template <RowFormat kFormat, typename Unpack, typename Out>
void look_up_group(Unpack, const uint8_t* row, int64_t column, const Entries& entries, Out* out) {
  alignas(64) float group[kCodeGroup];
  float* target = group;
  if constexpr (std::is_same_v<Out, float>) target = out;
  Unpack::template look_up<kFormat>(row, column, entries, [&](const auto& floats, int i) {
    std::memcpy(target + i, &floats, sizeof(floats));
  });
  if constexpr (!std::is_same_v<Out, float>) {
    for (int64_t i = 0; i < kCodeGroup; ++i) {
      out[i].bits = static_cast<uint16_t>(float_to_bits(group[i]));
    }
  }
}

// Looks up the entries of columns [begin, end) of a row.
template <RowFormat kFormat, typename Unpack, typename Out>
void look_up(Unpack how, const uint8_t* row, int64_t begin, int64_t end, const Entries& entries,
             Out* out) {
  for (; begin + kCodeGroup <= end; begin += kCodeGroup, out += kCodeGroup) {
    look_up_group<kFormat>(how, row, begin, entries, out);
  }
  if (begin == end) return;
  const int64_t before = begin / codes_per_byte(kFormat);
  uint8_t bytes[kCodeGroup] = {};
  std::memcpy(bytes, row + before, code_bytes(end, kFormat) - before);
  Out group[kCodeGroup];
  look_up_group<kFormat>(how, bytes, begin % codes_per_byte(kFormat), entries, group);
  std::memcpy(out, group, (end - begin) * sizeof(Out));
}

template <RowFormat kFormat, typename Unpack, typename Out>
void dequantize_row(Unpack how, const uint8_t* row, int64_t width, const Entries& entries,
                    bool streams, Out* out) {
  for (int64_t begin = 0; begin < width; begin += kPiece) {
    const int64_t n = std::min(width - begin, kPiece);
    Out piece[kPiece];
    Out* target = streams ? piece : out + begin;
    if (!streams) prefetch_ahead(target, n);
    if constexpr (kFormat == RowFormat::kInt8) {
      const float scale = scale_of<kFormat>(row, width);
      for (int64_t i = 0; i < n; ++i) {
        target[i] = round_to<Out>(static_cast<int8_t>(row[begin + i]) * scale);
      }
    } else {
      look_up<kFormat>(how, row, begin, begin + n, entries, target);
    }
    if (streams) stream_copy(out + begin, piece, n * sizeof(Out));
  }
}

// Multiplies the codes of a whole group by a scale. Reads at most kCodeGroup bytes.
template <RowFormat kFormat, typename Unpack>
void multiply_group(Unpack, const uint8_t* row, int64_t column, float scale, float* out) {
  if constexpr (kFormat == RowFormat::kInt8) {
    for (int64_t i = 0; i < kCodeGroup; ++i) out[i] = static_cast<int8_t>(row[column + i]) * scale;
  } else {
    Unpack::template look_up<kFormat>(row, column, kCodes<kFormat>, [&](const auto& codes, int i) {
      const auto products = codes * scale;
      std::memcpy(out + i, &products, sizeof(products));
    });
  }
}

// Dequantizes narrow rows, several per piece. A group also covers columns after the row, whose
// products the next row replaces.
template <typename Out, RowFormat kFormat, typename Unpack>
void dequantize_narrow(Unpack how, const RowDequantizeArgs& args, const Share& span, bool streams) {
  const int64_t width = args.width, bytes = row_bytes(width, kFormat), together = kPiece / width;
  for (int64_t begin = span.begin; begin < span.end; begin += together) {
    const int64_t n = std::min(span.end - begin, together);
    const uint8_t* rows = args.quantized + begin * bytes;
    uint8_t last[(1 + kScaleBytes) * kPiece + kCodeGroup];  // enough for rows of one column
    // A group may not cross the end of the input.
    if ((args.rows - begin - n) * bytes < kCodeGroup) {
      std::memcpy(last, rows, n * bytes);
      rows = last;
    }
    float products[kPiece + kCodeGroup];
    for (int64_t r = 0; r < n; ++r) {
      const uint8_t* row = rows + r * bytes;
      const float scale = scale_of<kFormat>(row, width);
      for (int64_t column = 0; column < width; column += kCodeGroup) {
        multiply_group<kFormat>(how, row, column, scale, products + r * width + column);
      }
    }
    auto* out = static_cast<Out*>(args.out) + begin * width;
    Out piece[kPiece];
    Out* target = streams ? piece : out;
    if (!streams) prefetch_ahead(target, n * width);
    for (int64_t i = 0; i < n * width; ++i) target[i] = round_to<Out>(products[i]);
    if (streams) stream_copy(out, piece, n * width * sizeof(Out));
  }
}

template <typename Out, RowFormat kFormat>
void dequantize_rows(const RowDequantizeArgs& args, const Parallel& parallel) {
  auto* out = static_cast<Out*>(args.out);
  const int64_t width = args.width, bytes = row_bytes(width, kFormat);
  const bool streams = args.rows * width * static_cast<int64_t>(sizeof(Out)) >= kStreamBytes;
  // A run-time value, because the compiler would unroll a loop of constant length.
  const int num_entries = entries_of(args.format);
  const int64_t tasks = std::min(parallel.threads, args.rows);
  parallel.run(tasks, [&](int64_t task) {
    const Share span = share(args.rows, tasks, task);
    vectorize_unpacking([&](auto how) {
      if (width <= kNarrow) {
        dequantize_narrow<Out, kFormat>(how, args, span, streams);
        return;
      }
      Entries entries[kRows] = {};
      for (int64_t begin = span.begin; begin < span.end; begin += kRows) {
        const int64_t n = std::min(span.end - begin, kRows);
        const uint8_t* rows = args.quantized + begin * bytes;
        for (int64_t r = 0; r < n && num_entries > 0; ++r) {
          const float scale = scale_of<kFormat>(rows + r * bytes, width);
          for (int i = 0; i < num_entries; ++i) {
            entries[r].of[i] = in_low_bits(round_to<Out>(code_at(i, kFormat) * scale));
          }
        }
        for (int64_t r = 0; r < n; ++r) {
          dequantize_row<kFormat>(how, rows + r * bytes, width, entries[r], streams,
                                  out + (begin + r) * width);
        }
      }
    });
    stream_end();
  });
}

}  // namespace

void row_dequantize(const RowDequantizeArgs& args, const Parallel& parallel) {
  dispatch(args.out_dtype, [&](auto out) {
    dispatch(args.format, [&](auto format) {
      dequantize_rows<decltype(out), decltype(format)::value>(args, parallel);
    });
  });
}

}  // namespace dct::cpu
