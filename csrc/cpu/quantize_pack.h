#pragma once

#include "../common/ops.h"
#include "parallel.h"

namespace dct::cpu {

// Every entry of residual + gradient into payloads, what is left into the residual.
void quantize_pack(const QuantizePackArgs& args, const Parallel& parallel);

}  // namespace dct::cpu
