#pragma once

#include "../common/ops.h"
#include "parallel.h"

namespace dct::cpu {

// Every row's entries as codes of few bits, with their scale.
void row_quantize(const RowQuantizeArgs& args, const Parallel& parallel);

}  // namespace dct::cpu
