#pragma once

#include "../common/ops.h"
#include "parallel.h"

namespace dct::cpu {

// Sums the payloads of all ranks into a dense tensor, in rank order.
void scatter_unpack(const ScatterUnpackArgs& args, const Parallel& parallel);

}  // namespace dct::cpu
