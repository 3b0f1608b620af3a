#pragma once

#include "../common/ops.h"
#include "parallel.h"

namespace dct::cpu {

// The sum of payloads of every entry, times a scale.
void dequantize_sum(const DequantizeSumArgs& args, const Parallel& parallel);

}  // namespace dct::cpu
