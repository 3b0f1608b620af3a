#pragma once

#include "../common/ops.h"
#include "parallel.h"

namespace dct::cpu {

// Puts packed rows back in place, zeros elsewhere.
void row_unpack(const RowUnpackArgs& args, const Parallel& parallel);

}  // namespace dct::cpu
