// scatter_unpack against a reader that follows docs/reference/payload.md to the letter, on
// sound and damaged payloads.

#include "../../csrc/cpu/kernels.h"
#include "sparse_oracle.h"
#include "support.h"

using namespace dct;
using namespace dct::test;

namespace {

// Changes some bytes of a payload, or all of them.
void damage(Random& random, uint8_t* out, const PayloadLayout& layout) {
  const bool everything = random.chance(0.1);
  for (int64_t i = 0; i < layout.nbytes && everything; ++i) out[i] = random.integer(0, 255);
  const int64_t ends[] = {0, layout.starts, layout.positions, layout.values};
  for (int64_t hits = random.integer(1, 3); hits > 0; --hits) {
    const int64_t section = random.integer(0, 2);
    uint8_t& byte = out[random.integer(ends[section], ends[section + 1] - 1)];
    byte = static_cast<uint8_t>(random.chance(0.5) ? random.integer(0, 255)
                                                   : byte ^ 1 << random.integer(0, 7));
  }
}

template <typename Value, typename Out>
void run(Random& random, int64_t numel, int64_t ranks) {
  const int64_t ranges = random.pick({1, 1, 2, 5});
  const int64_t capacity = random.pick<int64_t>({1, 40, numel / 50 + 1, numel + 3});
  const PayloadLayout layout = payload_layout(numel, capacity, kDType<Value>, ranges);
  AlignedBytes payloads(ranks * ranges * layout.nbytes, 0xA5);
  std::vector<float> sum(numel, 0.0f);
  std::vector<int32_t> expected(ranks, 0), status(ranks, -1);
  for (int64_t p = 0; p < ranks; ++p) {
    for (int64_t r = 0; r < ranges; ++r) {
      uint8_t* payload = payloads.data() + (p * ranges + r) * layout.nbytes;
      const Range range = range_bounds(numel, ranges, r);
      put_sparse<Value>(random, payload, layout, range.end - range.begin, capacity);
      if (random.chance(0.4)) damage(random, payload, layout);
      expected[p] |= read<Value>(
          payload, layout, range.end - range.begin, capacity,
          [&](int64_t i, float x) { sum[range.begin + i] = add(sum[range.begin + i], x); });
    }
  }
  const float out_scale = random.pick({1.0f, 65536.0f, NAN});
  std::vector<Out> memory = random.reals<Out>(numel + 1);
  Out* out = memory.data() + 1;

  ScatterUnpackArgs args{};
  args.payloads = payloads.data();
  args.ranks = ranks;
  args.ranges = ranges;
  args.capacity = capacity;
  args.value_dtype = kDType<Value>;
  args.out = out;
  args.out_dtype = kDType<Out>;
  args.numel = numel;
  args.scale = random.pick({1.0f, 1.0f / 3, -0.5f});
  args.out_scale = random.chance(0.5) ? &out_scale : nullptr;
  args.status = status.data();
  with_threads(random.integer(1, 4), [&](const cpu::Parallel& p) { cpu::scatter_unpack(args, p); });

  CHECK(status == expected, "status");
  const float factor = args.out_scale != nullptr ? multiply(args.scale, out_scale) : args.scale;
  std::vector<Out> wanted(numel);
  for (int64_t i = 0; i < numel; ++i) wanted[i] = make<Out>(add(0.0f, multiply(factor, sum[i])));
  check_bits("out", out, wanted.data(), numel);
}

}  // namespace

int main() {
  Random random(2);
  for (int64_t numel : {0, 1, 2, 2047, 2048, 2049, 16383, 16384, 16385, 32768, 100000}) {
    for (int repeat = 0; repeat < 10; ++repeat) {
      run<float, float>(random, numel, random.integer(0, 4));
      run<float, Float16>(random, numel, random.integer(0, 4));
      run<BFloat16, float>(random, numel, random.integer(0, 4));
      run<BFloat16, BFloat16>(random, numel, random.integer(0, 4));
    }
  }
  // So large that it is written past the caches, from an address that is a multiple of 4 only.
  run<float, float>(random, 8'400'001, 2);
}
