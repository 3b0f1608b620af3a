// mask_pack against a walk over the elements one by one, and conservation by its definition.

#include "../../csrc/common/payload.h"
#include "../../csrc/cpu/mask_pack.h"
#include "support.h"

using namespace dct;
using namespace dct::test;

namespace {

struct Case {
  int64_t numel, ranges, capacity, threads;
  std::vector<float> threshold, residual;
  float inv_scale;
};

Case random_case(Random& random, int64_t numel) {
  Case c{};
  c.numel = numel;
  c.ranges = random.pick({1, 1, 2, 3, 9});
  c.capacity = random.pick<int64_t>({1, 5, 100, numel / 50 + 1, numel + 1});
  c.threads = random.integer(1, 4);
  for (int64_t r = 0; r < c.ranges; ++r) {
    c.threshold.push_back(random.pick({0.0f, -1.0f, 1.0f, 2.5f, 2.5f, 1e-40f, HUGE_VALF, NAN}));
  }
  c.residual = random.reals<float>(numel);
  c.inv_scale = random.pick({1.0f, 0.3f, 1.0f / 65536, 1e30f});
  return c;
}

template <typename Grad, typename Value>
void run(const Case& c, const std::vector<Grad>& grad) {
  const PayloadLayout layout = payload_layout(c.numel, c.capacity, kDType<Value>, c.ranges);
  AlignedBytes payload(c.ranges * layout.nbytes, 0xA5), expected(c.ranges * layout.nbytes, 0xA5);
  std::vector<float> residual = c.residual;
  std::vector<int32_t> seen(c.ranges, -1), passed(c.ranges, 0);

  MaskPackArgs args{};
  args.residual = residual.data();
  args.grad = grad.data();
  args.grad_dtype = kDType<Grad>;
  args.numel = c.numel;
  args.ranges = c.ranges;
  args.threshold = c.threshold.data();
  args.seen = seen.data();
  args.payload = payload.data();
  args.capacity = c.capacity;
  args.value_dtype = kDType<Value>;
  args.inv_scale = &c.inv_scale;
  with_threads(c.threads, [&](const cpu::Parallel& p) { cpu::mask_pack(args, p); });

  for (int64_t r = 0; r < c.ranges; ++r) {
    uint8_t* out = expected.data() + r * layout.nbytes;
    const Range range = range_bounds(c.numel, c.ranges, r);
    uint32_t count = 0;
    uint8_t flags = 0;
    int64_t i = range.begin;
    for (int64_t b = 0; b <= num_blocks(range.end - range.begin); ++b) {
      std::memcpy(out + layout.starts + 4 * b, &count, 4);
      for (; i < std::min(range.begin + (b + 1) * kBlock, range.end); ++i) {
        const float old = c.residual[i];
        const float acc = add(old, multiply(static_cast<float>(value(grad[i])), c.inv_scale));
        float left = acc;
        if (!(std::fabs(acc) < c.threshold[r]) && acc != 0) {
          ++passed[r];
          if (count < c.capacity) {
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
    const uint32_t magic = 0x31544344, capacity = static_cast<uint32_t>(c.capacity);
    const uint64_t numel = range.end - range.begin;
    const uint8_t head[4] = {1, 0, static_cast<uint8_t>(kDType<Value>), flags};
    std::memset(out, 0, 64);
    std::memcpy(out, &magic, 4);
    std::memcpy(out + 4, head, 4);
    std::memcpy(out + 8, &numel, 8);
    std::memcpy(out + 16, &capacity, 4);
    std::memcpy(out + 20, &count, 4);
  }
  for (int64_t i = 0; i < payload.size(); ++i) {
    CHECK(payload.data()[i] == expected.data()[i], "payload byte %ld of range %ld",
          long(i % layout.nbytes), long(i / layout.nbytes));
  }
  CHECK(seen == passed, "seen");
}

template <typename Grad>
void run_both(const Case& c, Random& random) {
  const auto grad = random.reals<Grad>(c.numel);
  run<Grad, float>(c, grad);
  run<Grad, BFloat16>(c, grad);
}

}  // namespace

int main() {
  Random random(1);
  for (int64_t numel : {0, 1, 2, 63, 64, 65, 4095, 4096, 4097, 16383, 16384, 16385, 32768, 50000}) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      const Case c = random_case(random, numel);
      run_both<float>(c, random);
      run_both<BFloat16>(c, random);
      run_both<Float16>(c, random);
    }
  }
  // Enough entries that they are moved in parallel.
  Case large = random_case(random, 400'000);
  large.ranges = 1;
  large.threads = 3;
  large.capacity = 350'000;
  large.threshold = {0.0f};
  run_both<float>(large, random);
}
