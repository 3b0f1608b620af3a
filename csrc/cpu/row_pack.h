#pragma once

#include "../common/ops.h"
#include "parallel.h"

namespace dct::cpu {

// The k entries of largest magnitude of every row, with their positions.
void row_pack(const RowPackArgs& args, const Parallel& parallel);

}  // namespace dct::cpu
