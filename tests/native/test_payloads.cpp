// Compares mask_pack with a loop over the elements, sample_threshold with a sort, the sampled
// indices with their definition, and quantize_pack with the definition of dense payloads. The
// fuzzer checks scatter_unpack and dequantize_sum.

#include <functional>

#include "../../csrc/common/hash.h"
#include "../../csrc/common/payload.h"
#include "../../csrc/cpu/kernels.h"
#include "payload_oracle.h"
#include "sparse_oracle.h"
#include "support.h"

using namespace dct;
using namespace dct::test;

namespace {

template <typename Grad, typename Value>
void pack_largest(Random& random, int64_t numel, int64_t ranges, int64_t capacity,
                  const std::vector<float>& threshold) {
  const auto grad = random.reals<Grad>(numel);
  const auto before = random.reals<float>(numel);
  const float inv_scale = random.pick({1.0f, 0.3f, 1.0f / 65536, 1e30f});
  const PayloadLayout layout = payload_layout(numel, capacity, kDType<Value>, ranges);
  AlignedBytes payload(ranges * layout.nbytes, 0xA5), expected(ranges * layout.nbytes, 0xA5);
  std::vector<float> residual = before;
  std::vector<int32_t> seen(ranges, -1), passed(ranges, 0);

  MaskPackArgs args{};
  args.residual = residual.data();
  args.grad = grad.data();
  args.grad_dtype = kDType<Grad>;
  args.numel = numel;
  args.ranges = ranges;
  args.threshold = threshold.data();
  args.seen = seen.data();
  args.payload = payload.data();
  args.capacity = capacity;
  args.value_dtype = kDType<Value>;
  args.inv_scale = &inv_scale;
  with_threads(random.integer(2, 4), [&](const cpu::Parallel& p) { cpu::mask_pack(args, p); });

  for (int64_t r = 0; r < ranges; ++r) {
    uint8_t* out = expected.data() + r * layout.nbytes;
    const Range range = range_bounds(numel, ranges, r);
    uint32_t count = 0;
    uint8_t flags = 0;
    int64_t i = range.begin;
    for (int64_t b = 0; b <= num_blocks(range.end - range.begin); ++b) {
      std::memcpy(out + layout.starts + 4 * b, &count, 4);
      for (; i < std::min(range.begin + (b + 1) * kBlock, range.end); ++i) {
        const float old = before[i];
        const float acc = add(old, multiply(static_cast<float>(value(grad[i])), inv_scale));
        float left = acc;
        if (!(std::fabs(acc) < threshold[r]) && acc != 0) {
          ++passed[r];
          if (count < capacity) {
            const uint32_t packed = encode<Value>(acc, true);
            const auto position = static_cast<uint16_t>(i - range.begin - b * kBlock);
            std::memcpy(out + layout.positions + 2 * int64_t{count}, &position, 2);
            std::memcpy(out + layout.values + sizeof(Value) * count, &packed, sizeof(Value));
            ++count;
            const auto value = static_cast<float>(decode<Value>(packed));
            left = add(acc, -value);
            CHECK(!std::isfinite(acc) || bits(add(value, left)) == bits(acc), "conservation");
          } else {
            flags |= kFlagOverflow;
          }
        }
        if (!std::isfinite(acc)) {
          flags |= kFlagNonFinite;
          left = std::isfinite(old) ? old : 0.0f;
        }
        CHECK(bits(residual[i]) == bits(left), "residual[%ld]: expected %a, got %a", long(i), left,
              residual[i]);
      }
    }
    put_sparse_header<Value>(out, range.end - range.begin, capacity, count, flags);
  }
  for (int64_t i = 0; i < payload.size(); ++i) {
    CHECK(payload.data()[i] == expected.data()[i], "payload byte %ld of range %ld",
          long(i % layout.nbytes), long(i / layout.nbytes));
  }
  CHECK(seen == passed, "seen");
}

template <typename Grad>
void pack_both(Random& random, int64_t numel) {
  const int64_t ranges = random.pick({1, 1, 2, 3, 9});
  const int64_t capacity = random.pick<int64_t>({1, 5, 100, numel / 50 + 1, numel + 1});
  std::vector<float> threshold(ranges);
  for (float& t : threshold) {
    t = random.pick({0.0f, -1.0f, 1.0f, 2.5f, 2.5f, 1e-40f, HUGE_VALF, NAN});
  }
  pack_largest<Grad, float>(random, numel, ranges, capacity, threshold);
  pack_largest<Grad, BFloat16>(random, numel, ranges, capacity, threshold);
}

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

// Entries that are finite in most groups of 64.
template <typename T>
std::vector<T> mostly_finite(Random& random, int64_t numel) {
  std::vector<T> x = random.reals<T>(numel);
  bool finite = true;
  for (int64_t i = 0; i < numel; ++i) {
    if (i % kPerGroup == 0) finite = random.chance(0.9);
    if (finite && !std::isfinite(value(x[i]))) x[i] = make<T>(random.integer(-3, 3) / 2.0);
  }
  return x;
}

void check_bytes(const char* what, AlignedBytes& actual, AlignedBytes& expected) {
  for (int64_t i = 0; i < actual.size(); ++i) {
    CHECK(actual.data()[i] == expected.data()[i], "%s: byte %ld: %d, got %d", what, long(i),
          expected.data()[i], actual.data()[i]);
  }
}

template <typename Grad>
void pack(Random& random, int64_t numel, const Kind& kind) {
  const int64_t ranges = random.pick({1, 1, 2, 5});
  const bool has_residual = random.chance(0.7);
  const int64_t nbytes = bytes_for(kind, numel, ranges, random.pick({0, 16, 160}));
  const bool matrix = numel % ranges == 0 && random.chance(0.5);
  const int64_t length = matrix ? numel / ranges : range_length(numel, ranges);
  const std::vector<Grad> grad = mostly_finite<Grad>(random, numel + 1);
  std::vector<float> residual = mostly_finite<float>(random, numel + 1), expected = residual;
  const float inv_scale = random.pick({0.125f, 3.0f, -1.0f, NAN});
  AlignedBytes payload(ranges * nbytes, 0xA5), wanted(ranges * nbytes, 0xA5);

  QuantizePackArgs args{};
  args.residual = has_residual ? residual.data() + 1 : nullptr;
  args.grad = grad.data() + 1;
  args.grad_dtype = kDType<Grad>;
  args.numel = numel;
  args.payload = payload.data();
  args.ranges = ranges;
  args.range_length = length;
  args.nbytes = nbytes;
  args.format = kind.format;
  args.inv_scale = random.chance(0.5) ? &inv_scale : nullptr;
  with_threads(random.integer(1, 4), [&](const cpu::Parallel& p) { cpu::quantize_pack(args, p); });

  for (int64_t r = 0; r < ranges; ++r) {
    const Range range = range_of_length(numel, length, r);
    std::vector<float> acc;
    for (int64_t i = range.begin + 1; i <= range.end; ++i) {
      float scaled = static_cast<float>(value(grad[i]));
      if (args.inv_scale != nullptr) scaled = multiply(scaled, inv_scale);
      acc.push_back(has_residual ? add(expected[i], scaled) : scaled);
    }
    put(wanted.data() + r * nbytes, acc, has_residual ? expected.data() + 1 + range.begin : nullptr,
        kind);
  }
  check_bytes("payload", payload, wanted);
  check_bits("residual", residual.data(), expected.data(), numel + 1);
}

}  // namespace

int main() {
  Random random(1);
  for (int64_t numel : {0, 1, 2, 63, 64, 65, 4095, 4096, 4097, 16383, 16384, 16385, 32768, 50000}) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      pack_both<float>(random, numel);
      pack_both<BFloat16>(random, numel);
      pack_both<Float16>(random, numel);
    }
  }
  // Enough entries that the kernel moves them in parallel.
  pack_largest<float, float>(random, 400'000, 1, 350'000, {0.0f});
  pack_largest<float, BFloat16>(random, 400'000, 1, 350'000, {0.0f});
  check_picks();
  for (int64_t numel : {0, 1, 2, 15, 16, 17, 100, 1000, 16384, 16385, 33000, 70000}) {
    for (int repeat = 0; repeat < 8; ++repeat) {
      check_threshold<float>(random, numel);
      check_threshold<BFloat16>(random, numel);
      check_threshold<Float16>(random, numel);
    }
  }
  check_few_nonzeros();
  for (const Kind& kind : kKinds) {
    for (int64_t numel : {0, 1, 63, 64, 65, 1023, 1024, 1025, 5000, 16383, 16384, 16385, 33000}) {
      for (int repeat = numel < 10000 ? 3 : 1; repeat > 0; --repeat) {
        pack<float>(random, numel, kind);
        pack<BFloat16>(random, numel, kind);
        pack<Float16>(random, numel, kind);
      }
    }
  }
}
