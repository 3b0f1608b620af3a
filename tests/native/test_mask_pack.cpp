// Compares mask_pack with a loop over the elements, and checks conservation.

#include "../../csrc/cpu/kernels.h"
#include "sparse_oracle.h"
#include "support.h"

using namespace dct;
using namespace dct::test;

namespace {

template <typename Grad, typename Value>
void run(Random& random, int64_t numel, int64_t ranges, int64_t capacity,
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
void run_both(Random& random, int64_t numel) {
  const int64_t ranges = random.pick({1, 1, 2, 3, 9});
  const int64_t capacity = random.pick<int64_t>({1, 5, 100, numel / 50 + 1, numel + 1});
  std::vector<float> threshold(ranges);
  for (float& t : threshold) {
    t = random.pick({0.0f, -1.0f, 1.0f, 2.5f, 2.5f, 1e-40f, HUGE_VALF, NAN});
  }
  run<Grad, float>(random, numel, ranges, capacity, threshold);
  run<Grad, BFloat16>(random, numel, ranges, capacity, threshold);
}

}  // namespace

int main() {
  Random random(1);
  for (int64_t numel : {0, 1, 2, 63, 64, 65, 4095, 4096, 4097, 16383, 16384, 16385, 32768, 50000}) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      run_both<float>(random, numel);
      run_both<BFloat16>(random, numel);
      run_both<Float16>(random, numel);
    }
  }
  // Enough entries that the kernel moves them in parallel.
  run<float, float>(random, 400'000, 1, 350'000, {0.0f});
  run<float, BFloat16>(random, 400'000, 1, 350'000, {0.0f});
}
