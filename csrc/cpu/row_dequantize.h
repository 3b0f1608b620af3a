#pragma once

#include "../common/ops.h"
#include "parallel.h"

namespace dct::cpu {

// Rows of floats from their codes and scales, whatever these are.
void row_dequantize(const RowDequantizeArgs& args, const Parallel& parallel);

}  // namespace dct::cpu
