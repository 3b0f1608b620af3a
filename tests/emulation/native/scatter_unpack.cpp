// scatter_unpack.cpp -- sums of payloads, sound and damaged, against sums made one by one.
#include "cuda/scatter_unpack.cuh"

#include "payload.h"
#include "support.h"

namespace {

using dct::DType;
using test::Floats;
using test::Payload;
using test::Random;

template <typename T>
T read(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

// Adds what one rank sent for one range, as the contract says; returns its status.
int add(const uint8_t* bytes, const Payload& like, float* sum) {
  const int64_t numel = like.end - like.begin;
  const uint32_t count = read<uint32_t>(bytes + 20);
  std::vector<uint8_t> header(64);
  like.write_header(header.data());  // of an empty payload: only the count and the flags may vary
  for (int i = 0; i < 64; ++i) {
    if (i != 7 && (i < 20 || i >= 24) && bytes[i] != header[i]) return 1;
  }
  if (bytes[7] > 3 || count > like.capacity || count > static_cast<uint64_t>(numel)) return 1;
  if (numel == 0) return read<uint32_t>(bytes + 64) == 0 ? 0 : 2;
  int status = 0;
  const int64_t blocks = like.blocks();
  for (int64_t b = 0; b < blocks; ++b) {
    const uint32_t first = read<uint32_t>(bytes + 64 + 4 * b);
    const uint32_t end = read<uint32_t>(bytes + 68 + 4 * b);
    if (first > end || end > count || (b == 0 && first != 0) || (b == blocks - 1 && end != count)) {
      status |= 2;
      continue;
    }
    const int64_t length = std::min<int64_t>(numel - b * 16384, 16384);
    int64_t last = -1;
    bool ok = true;
    for (uint32_t e = first; e < end && ok; ++e) {
      const int64_t position = read<uint16_t>(bytes + like.positions_at + 2 * e);
      ok = position > last && position < length;
      last = position;
    }
    if (!ok) status |= 4;
    for (uint32_t e = first; e < end && ok; ++e) {
      const uint8_t* value = bytes + like.values_at + e * like.itemsize();
      const uint32_t bits = like.itemsize() == 4 ? read<uint32_t>(value) : read<uint16_t>(value);
      sum[b * 16384 + read<uint16_t>(bytes + like.positions_at + 2 * e)] +=
          test::widen(bits, like.value_dtype);
    }
  }
  if (bytes[7] == 3) sum[0] = NAN;
  return status;
}

void damage(Random& random, uint8_t* bytes, const Payload& payload) {
  if (payload.count() > 0 && random.chance(0.3)) {  // the last entry, just beyond the last element
    const uint16_t position = static_cast<uint16_t>((payload.end - payload.begin - 1) % 16384 + 1);
    std::memcpy(bytes + payload.positions_at + 2 * (payload.count() - 1), &position, 2);
    return;
  }
  const int64_t used = payload.positions_at + 2 * std::min<int64_t>(payload.capacity, 300);
  const int64_t at = random.chance(0.3) ? random.below(64)
                     : random.chance(0.5)
                         ? 64 + random.below(payload.positions_at - 64)
                         : payload.positions_at + random.below(used - payload.positions_at);
  bytes[at] = static_cast<uint8_t>(random.pick<int64_t>({0, 1, 255, 64, random.below(256)}));
}

void one_case(Random& random) {
  const int64_t numel = random.pick<int64_t>({0, 1, 1023, 1024, 16384, 16385, 20000, 40000});
  const int64_t ranks = random.pick<int64_t>({1, 2, 5, 35}),
                ranges = random.pick<int64_t>({1, 1, 2, 4});
  const int64_t capacity = random.pick<int64_t>({1, 300, 3000});
  const DType value_dtype = random.pick({DType::kFloat32, DType::kBFloat16});
  const DType out_dtype = random.pick({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  const float scale = random.pick({1.0f, 1.0f / 3.0f}), out_scale = random.pick({1.0f, 1024.0f});
  const bool accumulate = random.chance(0.5);

  const int64_t nbytes = Payload(numel, ranges, 0, capacity, value_dtype).nbytes;
  std::vector<uint8_t> payloads(ranks * ranges * nbytes, 0x5a);
  std::vector<int32_t> status(ranks, 0), got_status(ranks, -1);
  std::vector<float> sum(numel, 0.0f);
  for (int64_t p = 0; p < ranks; ++p) {
    for (int64_t r = 0; r < ranges; ++r) {
      const Payload empty(numel, ranges, r, capacity, value_dtype);
      Payload payload = empty;
      const double density = random.pick({0.0, 0.01, 0.1});
      for (int64_t i = 0; i < payload.end - payload.begin; ++i) {
        if (i % 16384 == 0) payload.start_block();
        if (payload.count() < capacity && random.chance(density)) {
          payload.append(i, random.value(true));
        }
      }
      payload.finish(random.pick({0, 1, 2, 3}));
      uint8_t* bytes = payloads.data() + (p * ranges + r) * nbytes;
      payload.write(bytes);
      if (random.chance(0.2)) damage(random, bytes, payload);
      status[p] |= add(bytes, empty, sum.data() + payload.begin);
    }
  }
  Floats out = Floats::random(random, out_dtype, numel, false), expected = out;
  for (int64_t i = 0; i < numel; ++i) {
    const float scaled = scale * out_scale * sum[i];
    expected.set(i, (accumulate ? out[i] : 0.0f) + scaled);
  }
  const dct::ScatterUnpackArgs args = {payloads.data(), ranks,      ranges,     capacity,
                                       value_dtype,     out.data(), out_dtype,  numel,
                                       scale,           accumulate, &out_scale, got_status.data()};
  test::expect(dct::cuda::scatter_unpack(args, nullptr) == cudaSuccess, "launch");
  test::expect_equal(out.bytes, expected.bytes, "out, byte");
  test::expect_equal(got_status, status, "status, rank");
}

}  // namespace

int main(int argc, char** argv) { return test::run(argc, argv, 12, one_case); }
