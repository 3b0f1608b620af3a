// thresholds.cpp -- sample_threshold against a sort.
#include <algorithm>

#include "cuda/sample_threshold.cuh"
#include "support.h"

namespace {

using dct::DType;
using test::Floats;
using test::Random;

uint32_t hash(uint32_t seed, uint32_t s, uint32_t j) {
  uint32_t x = seed * 0x9E3779B1u ^ s * 0x85EBCA77u ^ j * 0xC2B2AE3Du;
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ x >> 16;
}

void sample(Random& random) {
  const int64_t numel = random.pick<int64_t>({0, 1, 33, 5000, 20000});
  const int64_t count = random.pick<int64_t>({1, 3, 20});
  const int64_t max_samples = random.pick<int64_t>({1, 100, 4096, 4097, 65536});
  const double density = random.pick({1.0, 0.5, 0.01, 0.07});
  const uint32_t seed = random.generator();
  const bool has_residual = random.chance(0.5);
  const float inv_scale = random.chance(0.5) ? 1.0f : 1.0f / 3.0f;
  Floats x = Floats::random(
      random, random.pick({DType::kFloat32, DType::kBFloat16, DType::kFloat16}), numel, true);
  Floats residual = Floats::random(random, DType::kFloat32, numel, true);
  std::vector<int64_t> segments = test::segments(random, numel, count);

  std::vector<float> expected(count, INFINITY), actual(count, -1.0f);
  for (int64_t s = 0; s < count; ++s) {
    const int64_t n = segments[s + 1] - segments[s], m = std::min(n, max_samples);
    std::vector<float> magnitudes;
    for (int64_t j = 0; j < m; ++j) {
      const auto low = static_cast<int64_t>(static_cast<__int128>(j) * n / m);
      const auto high = static_cast<int64_t>(static_cast<__int128>(j + 1) * n / m);
      const auto offset = static_cast<__int128>(hash(seed, s, j)) * (high - low) >> 32;
      const int64_t i = segments[s] + (n <= max_samples ? j : low + static_cast<int64_t>(offset));
      const float scaled = x[i] * inv_scale;
      const float acc = std::fabs(has_residual ? residual[i] + scaled : scaled);
      magnitudes.push_back(std::isnan(acc) ? INFINITY : acc);
    }
    if (m == 0) continue;
    std::sort(magnitudes.begin(), magnitudes.end(), std::greater<float>());
    const double k = std::ceil(density * static_cast<double>(m));
    expected[s] = magnitudes[std::clamp<int64_t>(static_cast<int64_t>(k), 1, m) - 1];
  }
  const dct::SampleThresholdArgs args = {
      x.data(),        x.dtype, has_residual ? reinterpret_cast<float*>(residual.data()) : nullptr,
      segments.data(), count,   density,
      max_samples,     seed,    &inv_scale,
      actual.data()};
  test::Scratch scratch(dct::cuda::sample_threshold_scratch_bytes(args));
  test::expect(dct::cuda::sample_threshold(args, numel, scratch.data(), nullptr) == cudaSuccess,
               "launch");
  test::expect_equal(actual, expected, "threshold, segment");
}

// Whatever the offsets are, no access is out of bounds.
void garbage_segments(Random& random) {
  const int64_t numel = 5000, count = random.pick<int64_t>({0, 1, 3, 40});
  Floats x = Floats::random(random, DType::kFloat32, numel, true);
  const std::vector<int64_t> segments = test::garbage(random, numel, count);
  std::vector<float> threshold(count);
  const dct::SampleThresholdArgs args = {x.data(),
                                         x.dtype,
                                         nullptr,
                                         segments.data(),
                                         count,
                                         0.01,
                                         random.pick<int64_t>({100, 65536}),
                                         1,
                                         nullptr,
                                         threshold.data()};
  test::Scratch scratch(dct::cuda::sample_threshold_scratch_bytes(args));
  test::expect(dct::cuda::sample_threshold(args, numel, scratch.data(), nullptr) == cudaSuccess,
               "launch");
}

void one_case(Random& random) {
  sample(random);
  garbage_segments(random);
}

}  // namespace

int main(int argc, char** argv) { return test::run(argc, argv, 12, one_case); }
