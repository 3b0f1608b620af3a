#pragma once

#include "../common/ops.h"
#include "parallel.h"

namespace dct::cpu {

// The entries of x at the positions of an earlier row_pack.
void row_gather(const RowGatherArgs& args, const Parallel& parallel);

}  // namespace dct::cpu
