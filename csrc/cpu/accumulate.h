#pragma once

#include <cstdint>

#include "../common/floats.h"

namespace dct::cpu {

// residual + grad * inv_scale. The product and the sum are rounded separately.
template <typename Grad>
float accumulate(float residual, const Grad* grad, int64_t i, float inv_scale) {
  return residual + to_float(grad[i]) * inv_scale;
}

}  // namespace dct::cpu
