// quantize_pack, dequantize_sum and dequantize_sum_pack against the payload's definition, in
// integers and doubles; payloads are sound and damaged.

#include "../../csrc/cpu/kernels.h"
#include "payload_oracle.h"
#include "support.h"

using namespace dct;
using namespace dct::test;

namespace {

// Entries of which most groups of 64 are finite.
template <typename T>
std::vector<T> mostly_finite(Random& random, int64_t numel) {
  std::vector<T> x = random.reals<T>(numel);
  bool tame = true;
  for (int64_t i = 0; i < numel; ++i) {
    if (i % kTogether == 0) tame = random.chance(0.9);
    if (tame && !std::isfinite(value(x[i]))) x[i] = make<T>(random.integer(-3, 3) / 2.0);
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
  args.nbytes = nbytes;
  args.format = kind.format;
  args.inv_scale = random.chance(0.5) ? &inv_scale : nullptr;
  with_threads(random.integer(1, 4), [&](const cpu::Parallel& p) { cpu::quantize_pack(args, p); });

  for (int64_t r = 0; r < ranges; ++r) {
    const Range range = range_bounds(numel, ranges, r);
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

// Payloads of any rows, most of them with the right header.
AlignedBytes received(Random& random, int64_t numel, const Kind& kind, int64_t ranks,
                      int64_t ranges, int64_t nbytes) {
  AlignedBytes payloads(ranks * ranges * nbytes, 0xA5);
  for (int64_t i = 0; i < ranks * ranges; ++i) {
    const Range range = range_bounds(numel, ranges, i % ranges);
    uint8_t* out = payloads.data() + i * nbytes;
    put(out, mostly_finite<float>(random, rows_of(range.end - range.begin) * kEntries), nullptr,
        kind);
    put_header(out, kind, range.end - range.begin, random.pick({0, 2}));
    for (int64_t hits = random.integer(0, 9) * random.integer(0, 1); hits > 0; --hits) {
      if (nbytes > 64) out[random.integer(64, nbytes - 1)] = random.integer(0, 255);
    }
    if (random.chance(0.2)) out[random.integer(0, 63)] ^= 1 << random.integer(0, 7);
  }
  return payloads;
}

template <typename Out>
void unpack(Random& random, int64_t numel, const Kind& kind, int64_t ranks) {
  const int64_t ranges = random.pick({1, 1, 2, 5});
  const int64_t nbytes = bytes_for(kind, numel, ranges, random.pick({0, 16, 160}));
  AlignedBytes payloads = received(random, numel, kind, ranks, ranges, nbytes);
  std::vector<int32_t> expected, status(ranks, -1);
  const auto sum = sum_of(payloads.data(), ranks, ranges, nbytes, numel, kind, expected);
  const float out_scale = random.pick({1.0f, 65536.0f, NAN});
  std::vector<Out> out(numel + 2, make<Out>(7));

  DequantizeSumArgs args{};
  args.payloads = payloads.data();
  args.ranks = ranks;
  args.ranges = ranges;
  args.nbytes = nbytes;
  args.format = kind.format;
  args.out = out.data() + 1;
  args.out_dtype = kDType<Out>;
  args.numel = numel;
  args.scale = random.pick({1.0f, 1.0f / 3, -0.5f});
  args.out_scale = random.chance(0.5) ? &out_scale : nullptr;
  args.status = status.data();
  with_threads(random.integer(1, 4), [&](const cpu::Parallel& p) { cpu::dequantize_sum(args, p); });

  CHECK(status == expected, "status");
  const float factor = args.out_scale != nullptr ? multiply(args.scale, out_scale) : args.scale;
  std::vector<Out> wanted(numel + 2, make<Out>(7));
  for (int64_t i = 0; i < numel; ++i) wanted[i + 1] = make<Out>(multiply(factor, sum[i]));
  check_bits("out", out.data(), wanted.data(), numel + 2);
}

void sum_and_pack(Random& random, int64_t numel, const Kind& kind) {
  const int64_t ranks = random.integer(0, 5);
  const int64_t nbytes_in = bytes_for(kind, numel, 1, random.pick({0, 32}));
  const int64_t nbytes = bytes_for(kind, numel, 1, random.pick({0, 48}));
  AlignedBytes payloads = received(random, numel, kind, ranks, 1, nbytes_in);
  std::vector<int32_t> expected_status, status(ranks, -1);
  const auto sum = sum_of(payloads.data(), ranks, 1, nbytes_in, numel, kind, expected_status);
  std::vector<float> residual = mostly_finite<float>(random, numel + 1), expected = residual;
  AlignedBytes payload(nbytes, 0xA5), wanted(nbytes, 0xA5);

  DequantizeSumPackArgs args{};
  args.payloads = payloads.data();
  args.ranks = ranks;
  args.nbytes_in = nbytes_in;
  args.residual = residual.data() + 1;
  args.numel = numel;
  args.payload = payload.data();
  args.nbytes = nbytes;
  args.format = kind.format;
  args.scale = random.pick({1.0f, 1.0f / 3, -0.5f});
  args.status = status.data();
  with_threads(random.integer(1, 4),
               [&](const cpu::Parallel& p) { cpu::dequantize_sum_pack(args, p); });

  CHECK(status == expected_status, "status");
  std::vector<float> acc;
  for (int64_t i = 0; i < numel; ++i) {
    acc.push_back(add(expected[i + 1], multiply(args.scale, sum[i])));
  }
  put(wanted.data(), acc, expected.data() + 1, kind);
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
        unpack<float>(random, numel, kind, random.integer(0, 5));
        unpack<BFloat16>(random, numel, kind, random.integer(0, 5));
        unpack<Float16>(random, numel, kind, random.integer(0, 5));
        sum_and_pack(random, numel, kind);
      }
    }
  }
  // So large that it is written past the caches, from an address that is a multiple of 4 only.
  unpack<float>(random, 8'400'001, kKinds[1], 1);
}
