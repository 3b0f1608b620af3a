#pragma once

// Decodes the positions of a row. They are not trusted.

#include "../../common/row_layout.h"
#include "scan.cuh"

namespace dct::cuda {

// The encoding of the positions of a tensor, computed once on the host.
struct PositionFormat {
  PositionEncoding encoding;
  int64_t bytes;  // per row

  PositionFormat(int64_t width, int64_t k)
      : encoding(position_encoding(width, k)), bytes(position_bytes(width, k)) {}
};

// Calls visit(slot, column) once for every slot in [0, k). The column is -1 if the position is not
// accepted. A list accepts a column that is inside the row and above all columns accepted before
// it. In a bitmap, slot j is the j-th set bit. Accepted columns are distinct. Index must be able to
// hold the width. By kGroup threads. All threads of a warp must call it, with rows of one format.
template <int kGroup, typename Index, typename Visit>
__device__ void for_each_slot(const PositionFormat& format, const uint8_t* positions, Index width,
                              Index k, ScanStorage<kGroup>& storage, Visit visit) {
  const int thread = thread_index() % kGroup;
  if (format.encoding != PositionEncoding::kBitmap) {
    int highest = -1;
#pragma unroll 1
    for (Index begin = 0; begin < k; begin += kGroup) {
      const Index slot = begin + thread;
      int column = -1;
      if (slot < k) {
        column = format.encoding == PositionEncoding::kUint8
                     ? positions[slot]
                     : positions[2 * slot] | positions[2 * slot + 1] << 8;
        if (column >= width) column = -1;
      }
      const ScanResult below = scan<kGroup>(column, Max{}, storage);
      if (slot < k) visit(slot, column > max(highest, below.exclusive) ? column : -1);
      highest = max(highest, below.aggregate);
    }
    return;
  }
  const auto bytes = static_cast<Index>(format.bytes);
  Index slots = 0;
#pragma unroll 1
  for (Index begin = 0; begin < bytes; begin += kGroup) {
    const Index byte = begin + thread;
    unsigned bits = byte < bytes ? positions[byte] : 0;
    if (byte == bytes - 1) bits &= 0xffu >> (8 * bytes - width);
    const ScanResult set = scan<kGroup>(__popc(bits), Sum{}, storage);
    for (Index slot = slots + set.exclusive; bits != 0 && slot < k; bits &= bits - 1) {
      visit(slot++, static_cast<int>(8 * byte) + __ffs(static_cast<int>(bits)) - 1);
    }
    slots += set.aggregate;
  }
  for (Index slot = slots + thread; slot < k; slot += kGroup) visit(slot, -1);
}

}  // namespace dct::cuda
