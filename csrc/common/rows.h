#pragma once

// Encoding of a row's k positions: the smallest of three, by (width, k) alone. Both sides know
// these, so it is not part of the message.

#include <cstdint>

#include "floats.h"

namespace dct {

enum class PositionEncoding {
  kBitmap,  // ceil(width / 8) bytes, least significant bit first
  kUint8,   // k columns of one byte, width <= 256
  kUint16,  // k columns of two bytes, little-endian, width <= 65,536
};

// The smallest; the first of the list above on a tie.
DCT_HOST_DEVICE constexpr PositionEncoding position_encoding(int64_t width, int64_t k) {
  const int64_t bitmap = width / 8 + (width % 8 != 0);
  if (width <= 256 && k < bitmap) return PositionEncoding::kUint8;
  if (width <= 65536 && 2 * k < bitmap) return PositionEncoding::kUint16;
  return PositionEncoding::kBitmap;
}

// Bytes of one row's positions.
DCT_HOST_DEVICE constexpr int64_t position_bytes(int64_t width, int64_t k) {
  switch (position_encoding(width, k)) {
    case PositionEncoding::kUint8:
      return k;
    case PositionEncoding::kUint16:
      return 2 * k;
    default:
      return width / 8 + (width % 8 != 0);
  }
}

}  // namespace dct
