#pragma once

#include "../common/ops.h"
#include "parallel.h"

namespace dct::cpu {

// Nudges each threshold so that what passes stays near its target.
void track_threshold(const TrackThresholdArgs& args, const Parallel& parallel);

}  // namespace dct::cpu
