#include "track_threshold.h"

#include <cmath>

namespace dct::cpu {
namespace {

// NaN if either is NaN; b if they are equal, which tells zeros apart.
float maximum(float a, float b) { return std::isnan(a) || a > b ? a : b; }
float minimum(float a, float b) { return std::isnan(a) || a < b ? a : b; }

}  // namespace

void track_threshold(const TrackThresholdArgs& args, const Parallel&) {
  for (int64_t s = 0; s < args.num_segments; ++s) {
    const float tau = args.threshold[s];
    if (tau < 0) continue;  // a skipped segment stays skipped
    const float excess = 0.05f * (static_cast<float>(args.seen[s]) - args.target[s]);
    const float relative = excess / maximum(args.target[s], 1.0f);
    const float moved = tau * (1.0f + minimum(maximum(relative, -0.05f), 0.25f));
    args.threshold[s] =
        minimum(maximum(moved, 0.25f * args.reference[s]), 64.0f * args.reference[s]);
  }
}

}  // namespace dct::cpu
