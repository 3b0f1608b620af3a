// Compares quantize_pack with the definition of dense payloads. The fuzzer checks dequantize_sum.

#include "../../csrc/cpu/kernels.h"
#include "payload_oracle.h"
#include "support.h"

using namespace dct;
using namespace dct::test;

namespace {

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
  Random random(6);
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
