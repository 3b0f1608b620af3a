#pragma once

// Where row_pack writes one row: both kernels say in column order which columns they choose.

#include "../../common/ops.h"
#include "../../common/rows.h"
#include "row_elements.cuh"

namespace dct::cuda {

struct PackedRow {
  const RowPackArgs& args;
  int64_t row;
  PositionEncoding encoding;
  uint8_t* positions;

  __device__ PackedRow(const RowPackArgs& args, int64_t row)
      : args(args),
        row(row),
        encoding(position_encoding(args.width, args.k)),
        positions(args.positions + row * position_bytes(args.width, args.k)) {}

  __device__ bool has_bitmap() const { return encoding == PositionEncoding::kBitmap; }

  // Column `column` is the slot-th that is chosen. A bitmap is written by the caller.
  __device__ void store(int64_t slot, int64_t column) const {
    const float x = load_element(args.x, row * args.width + column, args.x_dtype);
    store_element(args.values, row * args.k + slot, x, args.value_dtype);
    if (encoding == PositionEncoding::kUint8) {
      positions[slot] = static_cast<uint8_t>(column);
    } else if (encoding == PositionEncoding::kUint16) {
      positions[2 * slot] = static_cast<uint8_t>(column);
      positions[2 * slot + 1] = static_cast<uint8_t>(column >> 8);
    }
  }
};

// What is chosen: keys above `cut`, and the first `ties` of those equal to it.
struct Choice {
  int cut;
  int64_t ties;
};

}  // namespace dct::cuda
