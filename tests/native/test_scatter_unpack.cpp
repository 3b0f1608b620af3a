// scatter_unpack against a reader that follows docs/reference/payload.md to the letter, on
// payloads sound, damaged and random.

#include "../../csrc/cpu/scatter_unpack.h"
#include "sparse_oracle.h"
#include "support.h"

using namespace dct;
using namespace dct::test;

namespace {

// A sound payload of some entries of [0, numel).
template <typename Value>
void fill(Random& random, uint8_t* out, const PayloadLayout& layout, int64_t numel,
          int64_t capacity, bool alarm) {
  std::vector<uint32_t> starts;
  uint32_t count = 0;
  const double density = random.pick({0.001, 0.02, 1.0});
  for (int64_t i = 0; i < numel; ++i) {
    if (i % kBlock == 0) starts.push_back(count);
    if (count == capacity || !random.chance(density)) continue;
    const auto position = static_cast<uint16_t>(i % kBlock);
    const auto value = make<Value>(random.real());
    std::memcpy(out + layout.positions + 2 * int64_t{count}, &position, 2);
    std::memcpy(out + layout.values + sizeof(Value) * count, &value, sizeof(Value));
    ++count;
  }
  starts.push_back(count);
  std::memcpy(out + layout.starts, starts.data(), 4 * starts.size());
  PayloadHeader header{};
  header.magic = kPayloadMagic;
  header.version = kPayloadVersion;
  header.value_dtype = sizeof(Value) == 4 ? 0 : 1;
  header.flags = alarm ? 3 : static_cast<uint8_t>(random.integer(0, 2));
  header.numel = numel;
  header.capacity = static_cast<uint32_t>(capacity);
  header.count = count;
  std::memcpy(out, &header, 64);
}

void damage(Random& random, uint8_t* out, const PayloadLayout& layout, int64_t numel,
            int64_t capacity) {
  auto put = [&](int64_t offset, int64_t number, int bytes) {
    std::memcpy(out + offset, &number, bytes);
  };
  const int64_t blocks = num_blocks(numel),
                ends[] = {0, layout.starts, layout.positions, layout.values};
  uint32_t count;
  std::memcpy(&count, out + 20, 4);
  for (int64_t hits = random.integer(1, 3); hits > 0; --hits) {
    switch (random.integer(0, 5)) {
      case 0:  // everything
        for (int64_t i = 0; i < layout.nbytes; ++i) put(i, random.integer(0, 255), 1);
        break;
      case 1:  // one start
        put(layout.starts + 4 * random.integer(0, blocks), random.integer(0, count + 2), 4);
        break;
      case 2: {  // a count too large, or just not
        const int64_t wrong = random.pick({capacity, capacity + 1, numel, numel + 1});
        put(20, wrong, 4);
        put(layout.starts + 4 * blocks, wrong, 4);
        break;
      }
      case 3:  // a position twice
        if (count > 1) {
          const int64_t at = layout.positions + 2 * random.integer(0, int64_t{count} - 2);
          std::memcpy(out + at, out + at + 2, 2);
        }
        break;
      default: {  // one byte or bit of a section
        const int64_t section = random.integer(0, 2);
        const int64_t at = random.integer(ends[section], ends[section + 1] - 1);
        put(at, random.chance(0.5) ? random.integer(0, 255) : out[at] ^ (1 << random.integer(0, 7)),
            1);
      }
    }
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
      fill<Value>(random, payload, layout, range.end - range.begin, capacity, random.chance(0.1));
      if (random.chance(0.4)) damage(random, payload, layout, range.end - range.begin, capacity);
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
  for (int64_t i = 0; i < numel; ++i) {
    const Out wanted = make<Out>(add(0.0f, multiply(factor, sum[i])));
    CHECK(bits(out[i]) == bits(wanted), "out[%ld]: expected %g, got %g", long(i), value(wanted),
          value(out[i]));
  }
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
