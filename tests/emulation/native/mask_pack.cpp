// mask_pack.cpp -- the kernel against the contract, element by element, under random schedules.
#include "cuda/mask_pack.cuh"

#include "payload.h"
#include "support.h"

namespace {

using dct::DType;
using test::Floats;
using test::Random;

// As the tensor is cut up by itself, or in tiles of larger ones, of several passes, with little
// room.
void run(Random& random, const dct::MaskPackArgs& args) {
  dct::cuda::MaskPackSizes sizes = dct::cuda::mask_pack_sizes(args);
  if (random.chance(0.8)) {
    sizes.warp_tile = random.pick({args.grad != nullptr ? 512 : 1024, 1024, 2048, 2048, 2048});
    sizes.room = random.pick({8, 24, 64, 256, 256});
  }
  test::Scratch scratch(dct::cuda::mask_pack_scratch_bytes(args, sizes));
  test::expect(dct::cuda::mask_pack(args, sizes, scratch.data(), nullptr) == cudaSuccess, "launch");
}

void one_case(Random& random) {
  const int64_t numel = random.pick<int64_t>({0, 1, 4095, 4096, 4097, 12289, 16384, 20000, 36865});
  const int64_t ranges = random.pick<int64_t>({1, 1, 2, 3}),
                count = random.pick<int64_t>({1, 2, 30});
  const bool has_grad = random.chance(0.8);
  const DType grad_dtype = random.pick({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  const DType value_dtype = random.pick({DType::kFloat32, DType::kBFloat16});
  const int64_t capacity = random.pick<int64_t>({1, 50, 1000, numel + 1});
  Floats residual = Floats::random(random, DType::kFloat32, numel, true);
  Floats grad = Floats::random(random, grad_dtype, has_grad ? numel : 0, true);
  std::vector<int64_t> segments = test::segments(random, numel, count);
  std::vector<float> tau(count);
  for (float& t : tau) t = random.pick({-1.0f, 0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 4.0f, NAN, INFINITY});
  const float inv_scale = random.chance(0.5) ? 1.0f : 1.0f / 3.0f;
  std::vector<int32_t> status(random.pick<size_t>({0, 1, 31, 32, 33, 100}), 0);
  const bool damage = !status.empty() && random.chance(0.5);
  if (damage) status[random.below(status.size())] = random.pick({1, 2, 4, -1});

  // What must come out, in the order in which a single thread would find it.
  Floats left = residual;
  std::vector<int32_t> seen(count, 0);
  std::vector<test::Payload> payloads;
  for (int64_t r = 0; r < ranges; ++r) {
    test::Payload payload(numel, ranges, r, capacity, value_dtype);
    uint64_t kept = 0;
    bool non_finite = false;
    for (int64_t i = payload.begin; i < payload.end; ++i) {
      if ((i - payload.begin) % 16384 == 0) payload.start_block();
      int64_t s = 0;
      while (segments[s + 1] <= i) ++s;
      if (tau[s] < 0) continue;
      const float old = residual[i];
      const float acc = has_grad ? old + grad[i] * inv_scale : old;
      if (!std::isfinite(acc)) {
        non_finite = true;
        left.set_bits(i, std::isfinite(old) ? residual.bits(i) : 0);
      } else {
        left.set_bits(i, test::bits_of(acc));
      }
      if (std::fabs(acc) < tau[s] || acc == 0) continue;
      ++seen[s];
      if (kept++ >= static_cast<uint64_t>(capacity)) continue;
      const float value = payload.append(i - payload.begin, acc);
      if (std::isfinite(acc)) left.set_bits(i, test::bits_of(acc - value));
    }
    payload.finish((kept > static_cast<uint64_t>(capacity) ? 1 : 0) | (non_finite ? 2 : 0) |
                   (damage ? 4 : 0));
    payloads.push_back(payload);
  }

  const int64_t nbytes = payloads[0].nbytes;
  std::vector<uint8_t> packed(nbytes * ranges + 16, 0x5a), expected = packed;
  for (int64_t r = 0; r < ranges; ++r) payloads[r].write(expected.data() + r * nbytes);
  std::vector<int32_t> counted(count, -1);
  const dct::MaskPackArgs args = {reinterpret_cast<float*>(residual.data()),
                                  has_grad ? grad.data() : nullptr,
                                  grad_dtype,
                                  numel,
                                  segments.data(),
                                  tau.data(),
                                  counted.data(),
                                  count,
                                  packed.data(),
                                  ranges,
                                  capacity,
                                  value_dtype,
                                  &inv_scale,
                                  status.data(),
                                  static_cast<int64_t>(status.size())};
  run(random, args);
  test::expect_equal(residual.bytes, left.bytes, "residual, byte");
  test::expect_equal(packed, expected, "payload, byte");
  test::expect_equal(counted, seen, "seen, segment");
}

// Whatever the offsets are, no access is out of bounds and no tile waits for ever.
void garbage_segments(Random& random) {
  const int64_t numel = 20000, count = random.pick<int64_t>({0, 1, 3, 40}), capacity = 500;
  Floats residual = Floats::random(random, DType::kFloat32, numel, true);
  const std::vector<int64_t> segments = test::garbage(random, numel, count);
  const std::vector<float> tau(count, 1.0f);
  std::vector<int32_t> seen(count);
  std::vector<uint8_t> payload(test::Payload(numel, 1, 0, capacity, DType::kFloat32).nbytes);
  const dct::MaskPackArgs args = {reinterpret_cast<float*>(residual.data()),
                                  nullptr,
                                  DType::kFloat32,
                                  numel,
                                  segments.data(),
                                  tau.data(),
                                  seen.data(),
                                  count,
                                  payload.data(),
                                  1,
                                  capacity,
                                  DType::kFloat32,
                                  nullptr,
                                  nullptr,
                                  0};
  run(random, args);
}

}  // namespace

int main(int argc, char** argv) {
  return test::run(argc, argv, 12, one_case) | test::run(argc, argv, 4, garbage_segments);
}
