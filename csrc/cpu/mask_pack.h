#pragma once

#include "../common/ops.h"
#include "parallel.h"

namespace dct::cpu {

// Error feedback, threshold mask and compaction in one pass over memory.
void mask_pack(const MaskPackArgs& args, const Parallel& parallel);

}  // namespace dct::cpu
