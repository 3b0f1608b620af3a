#pragma once

// The output of row_pack for one row. Both kernels write the selected columns in order.

#include "../../common/ops.h"
#include "../../common/row_layout.h"
#include "row_elements.cuh"

namespace dct::cuda {

struct PackedRow {
  PositionEncoding encoding;
  DType value_dtype;
  uint8_t *values, *positions;

  __device__ PackedRow(const RowPackArgs& args, int64_t row)
      : encoding(position_encoding(args.width, args.k)),
        value_dtype(args.value_dtype),
        values(static_cast<uint8_t*>(args.values) + row * args.k * itemsize(args.value_dtype)),
        positions(args.positions + row * position_bytes(args.width, args.k)) {}

  __device__ bool has_bitmap() const { return encoding == PositionEncoding::kBitmap; }

  // Stores x and its column in a slot. The caller writes bitmaps.
  template <typename Index>
  __device__ void store(Index slot, Index column, float x) const {
    store_element(values, slot, x, value_dtype);
    if (encoding == PositionEncoding::kUint8) {
      positions[slot] = static_cast<uint8_t>(column);
    } else if (encoding == PositionEncoding::kUint16) {
      positions[2 * slot] = static_cast<uint8_t>(column);
      positions[2 * slot + 1] = static_cast<uint8_t>(column >> 8);
    }
  }
};

// The selection in a row: all keys above `threshold`, and the first `ties` keys equal to it.
struct TopK {
  int threshold;
  int64_t ties;
};

}  // namespace dct::cuda
