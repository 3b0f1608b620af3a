#pragma once

#include "../../common/e3m0.h"

namespace dct::cuda {

// Where a payload's sections begin, and its size, in bytes. Of e3m0, `positions` are whole entries;
// the other formats have no sub-starts.
struct Sections {
  int64_t starts, sub_starts, positions, values, nbytes;

  Sections(int64_t numel, int64_t capacity, DType value_dtype, int64_t ranges) {
    if (value_dtype == DType::kE3M0) {
      const E3M0Layout layout = e3m0_layout(numel, capacity, ranges);
      starts = layout.starts;
      sub_starts = layout.sub_starts;
      positions = values = layout.entries;
      nbytes = layout.nbytes;
    } else {
      const PayloadLayout layout = payload_layout(numel, capacity, value_dtype, ranges);
      starts = sub_starts = layout.starts;
      positions = layout.positions;
      values = layout.values;
      nbytes = layout.nbytes;
    }
  }
};

}  // namespace dct::cuda
