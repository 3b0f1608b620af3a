// A row's bytes are looked up in a table of the codes they hold; then codes become floats.

#include "row_dequantize.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "../common/row_formats.h"
#include "mxfp4.h"
#include "stream_copy.h"
#include "vectorise.h"

namespace dct::cpu {
namespace {

constexpr int64_t kEntry = 8;  // bytes of a table's entry: as many codes as a byte can hold

// Code `index` of those that `byte` holds, whatever the byte is.
constexpr int8_t code_of(int byte, int index, RowFormat format) {
  switch (format) {
    case RowFormat::kInt4:
      return static_cast<int8_t>(((byte >> 4 * index & 15) ^ 8) - 8);
    case RowFormat::kSign:
      return static_cast<int8_t>(1 - 2 * (byte >> index & 1));
    default: {
      int number = std::min((byte + 121) & 255, 242);  // 0 to 242 for -121 to 121
      for (int i = 0; i < index; ++i) number /= 3;
      return static_cast<int8_t>(number % 3 - 1);
    }
  }
}

template <RowFormat kFormat>
constexpr auto kCodes = [] {
  std::array<std::array<int8_t, kEntry>, 256> codes{};
  for (int byte = 0; byte < 256; ++byte) {
    for (int i = 0; i < codes_per_byte(kFormat); ++i) codes[byte][i] = code_of(byte, i, kFormat);
  }
  return codes;
}();

// One task's working memory, for rows of `width` columns.
template <typename Out>
struct Scratch {
  explicit Scratch(int64_t width)
      : codes(new int8_t[width + 2 * kEntry]), floats(new float[width]), row(new Out[width]) {}
  std::unique_ptr<int8_t[]> codes;  // with room for the entry of the last byte
  std::unique_ptr<float[]> floats;
  std::unique_ptr<Out[]> row;
};

template <RowFormat kFormat>
const int8_t* unpack_codes(const uint8_t* row, int64_t bytes, int8_t* codes) {
  if constexpr (kFormat == RowFormat::kInt8) return reinterpret_cast<const int8_t*>(row);
  if constexpr (kFormat == RowFormat::kInt4) {
    for (int64_t i = 0; i < bytes; ++i) {
      codes[2 * i] = static_cast<int8_t>(((row[i] & 15) ^ 8) - 8);
      codes[2 * i + 1] = static_cast<int8_t>(row[i]) >> 4;
    }
    return codes;
  }
  for (int64_t i = 0; i < bytes; ++i) {
    std::memcpy(codes + codes_per_byte(kFormat) * i, kCodes<kFormat>[row[i]].data(), kEntry);
  }
  return codes;
}

template <RowFormat kFormat, typename Out>
void dequantize_row(const uint8_t* row, int64_t width, const Scratch<Out>& scratch, Out* out) {
  if constexpr (kFormat == RowFormat::kMxfp4) {
    dequantize_mxfp4(row, width, scratch.floats.get());
    for (int64_t i = 0; i < width; ++i) out[i] = round_to<Out>(scratch.floats[i]);
  } else {
    const int64_t bytes = code_bytes(width, kFormat);
    const int8_t* codes = unpack_codes<kFormat>(row, bytes, scratch.codes.get());
    BFloat16 bits;
    std::memcpy(&bits, row + bytes, kScaleBytes);
    const float scale = to_float(bits);
    for (int64_t i = 0; i < width; ++i) {
      out[i] = round_to<Out>(static_cast<float>(codes[i]) * scale);
    }
  }
}

template <typename Out, RowFormat kFormat>
void dequantize_rows(const RowDequantizeArgs& args, const Parallel& parallel) {
  auto* out = static_cast<Out*>(args.out);
  const int64_t width = args.width, bytes = row_bytes(width, kFormat);
  const int64_t size = width * static_cast<int64_t>(sizeof(Out));
  const bool streams = args.rows * size >= kStreamBytes;
  const int64_t tasks = std::min(parallel.threads, args.rows);
  std::vector<Scratch<Out>> scratch;
  for (int64_t task = 0; task < tasks; ++task) scratch.emplace_back(width);
  parallel.run(tasks, [&](int64_t task) {
    const Share mine = share(args.rows, tasks, task);
    const Scratch<Out>& own = scratch[task];
    vectorise([&] {
      for (int64_t row = mine.begin; row < mine.end; ++row) {
        const uint8_t* quantized = args.quantized + row * bytes;
        Out* target = streams ? own.row.get() : out + row * width;
        dequantize_row<kFormat>(quantized, width, own, target);
        if (streams) stream_copy(out + row * width, target, size);
      }
    });
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
