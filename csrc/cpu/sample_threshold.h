#pragma once

#include "../common/ops.h"
#include "parallel.h"

namespace dct::cpu {

// Per segment, the magnitude that a fraction `density` of the entries reaches.
void sample_threshold(const SampleThresholdArgs& args, const Parallel& parallel);

}  // namespace dct::cpu
