// Compares sample_threshold with a sort, and the sampled indices with their definition.

#include <functional>

#include "../../csrc/common/hash.h"
#include "../../csrc/common/payload.h"
#include "../../csrc/cpu/kernels.h"
#include "support.h"

using namespace dct;
using namespace dct::test;

namespace {

void check_picks() {
  // The expected hash was computed in Python from the published definition.
  CHECK(hash32(0, 0, 0) == 0 && hash32(1, 2, 3) == 0xA99CD169u, "%08x", hash32(1, 2, 3));
  for (int64_t n :
       {int64_t{11}, int64_t{65537}, (int64_t{1} << 31) + 5, (int64_t{1} << 45) + 123}) {
    for (int64_t m : {int64_t{1}, int64_t{10}, int64_t{65536}, (int64_t{1} << 31) - 1}) {
      if (m >= n) continue;
      for (int64_t j : {int64_t{0}, int64_t{1}, m / 3, m / 2, m - 1}) {
        if (j >= m) continue;
        using Wide = unsigned __int128;
        const Wide start = Wide(j) * n / m, end = (Wide(j) + 1) * n / m;
        const Wide pick = start + ((Wide(hash32(9, 4, uint32_t(j))) * (end - start)) >> 32);
        CHECK(stratified_pick(j, n, m, 9, 4) == int64_t(pick), "n %ld, m %ld, j %ld", long(n),
              long(m), long(j));
      }
    }
  }
}

template <typename Grad>
void check_threshold(Random& random, int64_t numel) {
  const auto grad = random.reals<Grad>(numel);
  const auto residual = random.reals<float>(numel);
  const float inv_scale = random.pick({1.0f, 0.3f, 1.0f / 65536});
  std::vector<float> threshold(random.pick({1, 1, 2, 3, 9}), -1.0f);
  SampleThresholdArgs args{};
  args.grad = grad.data();
  args.grad_dtype = kDType<Grad>;
  args.residual = residual.data();
  args.numel = numel;
  args.ranges = static_cast<int64_t>(threshold.size());
  args.density = random.pick({1e-6, 0.001, 0.07, 0.5, 1.0});
  args.max_samples = random.pick<int64_t>({1, 100, 65536, INT32_MAX});
  args.seed = static_cast<uint32_t>(random.integer(0, UINT32_MAX));
  args.inv_scale = random.chance(0.5) ? &inv_scale : nullptr;
  args.threshold = threshold.data();
  with_threads(random.integer(1, 4),
               [&](const cpu::Parallel& p) { cpu::sample_threshold(args, p); });

  for (int64_t r = 0; r < args.ranges; ++r) {
    const Range range = range_bounds(numel, args.ranges, r);
    const int64_t n = range.end - range.begin, m = std::min(n, args.max_samples);
    std::vector<float> magnitudes;
    for (int64_t j = 0; j < m; ++j) {
      const int64_t i =
          range.begin +
          (n <= args.max_samples ? j : stratified_pick(j, n, m, args.seed, uint32_t(r)));
      const float scaled =
          multiply(static_cast<float>(value(grad[i])), args.inv_scale ? inv_scale : 1.0f);
      const float acc = add(residual[i], scaled);
      magnitudes.push_back(std::isnan(acc) ? HUGE_VALF : std::fabs(acc));
    }
    std::sort(magnitudes.begin(), magnitudes.end(), std::greater<float>());
    const auto k = std::clamp<int64_t>(int64_t(std::ceil(args.density * double(m))), 1, m);
    const float expected = m == 0 ? HUGE_VALF : magnitudes[k - 1];
    CHECK(bits(threshold[r]) == bits(expected), "n %ld, k %ld: expected %g, got %g", long(n),
          long(k), expected, threshold[r]);
  }
}

// At most k entries are nonzero, and their magnitudes differ widely.
void check_few_nonzeros() {
  const float grad[] = {0, 1e-20f, 0, -1, 0, 0}, residual[6] = {};
  float threshold = -1;
  SampleThresholdArgs args{};
  args.grad = grad;
  args.residual = residual;
  args.numel = 6;
  args.ranges = 1;
  args.max_samples = 100;
  args.threshold = &threshold;
  for (const auto& [density, expected] : {std::pair(2.0 / 6, 1e-20f), std::pair(3.0 / 6, 0.0f)}) {
    args.density = density;
    with_threads(1, [&](const cpu::Parallel& p) { cpu::sample_threshold(args, p); });
    CHECK(threshold == expected, "density %g: got %g", density, threshold);
  }
}

}  // namespace

int main() {
  check_picks();
  Random random(3);
  for (int64_t numel : {0, 1, 2, 15, 16, 17, 100, 1000, 16384, 16385, 33000, 70000}) {
    for (int repeat = 0; repeat < 8; ++repeat) {
      check_threshold<float>(random, numel);
      check_threshold<BFloat16>(random, numel);
      check_threshold<Float16>(random, numel);
    }
  }
  check_few_nonzeros();
}
