#pragma once

#include "../common/ops.h"
#include "parallel.h"

namespace dct::cpu {

// The sum of payloads of every entry, times a scale, packed again.
void dequantize_sum_pack(const DequantizeSumPackArgs& args, const Parallel& parallel);

}  // namespace dct::cpu
