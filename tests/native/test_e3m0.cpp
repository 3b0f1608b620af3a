// mask_pack and scatter_unpack of payload version 2, element by element and in double: codes,
// conservation, bytes, and readers of sound, damaged and random payloads.

#include "../../csrc/common/e3m0.h"
#include "../../csrc/cpu/mask_pack.h"
#include "../../csrc/cpu/scatter_unpack.h"
#include "support.h"

using namespace dct;
using namespace dct::test;

namespace {

template <typename T>
void put(uint8_t* out, int64_t offset, T value) {
  std::memcpy(out + offset, &value, sizeof(T));
}

template <typename T>
int64_t get(const uint8_t* in, int64_t offset) {
  T value;
  std::memcpy(&value, in + offset, sizeof(T));
  return static_cast<int64_t>(value);
}

// The exponent of the power of two nearest to x > 0, of two the larger, in [low, high].
int nearest(double x, int low, int high) {
  int best = low;
  for (int e = low; e <= high; ++e) {
    if (std::fabs(std::ldexp(1, e) - x) <= std::fabs(std::ldexp(1, best) - x)) best = e;
  }
  return best;
}

int scale_exponent(float x) { return std::isfinite(x) ? nearest(std::fabs(x), -126, 120) : 120; }

// Whether acc can be sent: half the scale or more, its last place no more than the largest code.
bool holds(float acc, int scale) {
  if (!std::isfinite(acc) || acc == 0) return false;
  const int last_place = std::max(std::ilogb(acc), -126) - 23;
  return std::fabs(acc) >= std::ldexp(1, scale - 1) && last_place <= scale + 7;
}

struct Case {
  int64_t numel, ranges, capacity, threads;
  std::vector<int64_t> segments;
  std::vector<float> tau, residual, grad, scale;
};

Case random_case(Random& random, int64_t numel) {
  Case c{};
  c.numel = numel;
  c.ranges = random.pick({1, 1, 2, 5});
  c.capacity = random.pick<int64_t>({1, 40, numel / 20 + 1, numel + 1});
  c.threads = random.integer(1, 4);
  c.segments = random.segments(numel);
  for (size_t s = 1; s < c.segments.size(); ++s) {
    c.tau.push_back(random.pick({0.0f, -1.0f, 1.0f, 2.5f, 1e-40f, HUGE_VALF, NAN}));
  }
  c.residual = random.reals<float>(numel);
  c.grad = random.reals<float>(numel);
  for (int64_t r = 0; r < c.ranges; ++r) {
    c.scale.push_back(random.pick({1.0f, 2.5f, 0.01f, 0.0f, 1e30f, NAN, random.real()}));
  }
  return c;
}

// Packs, and compares every byte, residual and count with a walk over the elements.
AlignedBytes packed(const Case& c) {
  const E3M0Layout layout = e3m0_layout(c.numel, c.capacity, c.ranges);
  AlignedBytes payload(c.ranges * layout.nbytes, 0xA5), expected(c.ranges * layout.nbytes, 0xA5);
  std::vector<float> residual = c.residual;
  std::vector<int32_t> seen(c.tau.size(), -1), passed(c.tau.size(), 0);
  MaskPackArgs args{};
  args.residual = residual.data();
  args.grad = c.grad.data();
  args.grad_dtype = DType::kFloat32;
  args.numel = c.numel;
  args.segments = c.segments.data();
  args.threshold = c.tau.data();
  args.seen = seen.data();
  args.num_segments = static_cast<int64_t>(c.tau.size());
  args.payload = payload.data();
  args.ranges = c.ranges;
  args.capacity = c.capacity;
  args.value_dtype = DType::kE3M0;
  args.scale = c.scale.data();
  with_threads(c.threads, [&](const cpu::Parallel& p) { cpu::mask_pack(args, p); });

  for (int64_t r = 0; r < c.ranges; ++r) {
    uint8_t* out = expected.data() + r * layout.nbytes;
    const Range range = range_bounds(c.numel, c.ranges, r);
    const int scale = scale_exponent(c.scale[r]);
    const int64_t numel = range.end - range.begin, blocks = num_blocks(numel);
    int64_t count = 0, first = 0;
    uint8_t flags = 0;
    for (int64_t at = 0; at < blocks * kBlock; ++at) {
      if (at % kBlock == 0) {
        first = count;
        put(out, layout.starts + at / kBlock * 4, static_cast<uint32_t>(count));
      } else if (at % 4096 == 0) {
        const int64_t q = at % kBlock / 4096;
        put(out, layout.sub_starts + (at / kBlock * 3 + q - 1) * 2,
            static_cast<uint16_t>(count - first));
      }
      if (at >= numel) continue;
      const int64_t i = range.begin + at;
      size_t s = 0;
      while (c.segments[s + 1] <= i) ++s;
      const float old = c.residual[i], acc = add(old, c.grad[i]);
      float left = std::isfinite(acc) ? acc : std::isfinite(old) ? old : 0.0f;
      if (c.tau[s] < 0) {
        left = old;
      } else {
        if (!std::isfinite(acc)) flags |= kFlagNonFinite;
        if (!(std::fabs(acc) < c.tau[s]) && acc != 0) {
          ++passed[s];
          if (holds(acc, scale) && count == c.capacity) {
            flags |= kFlagOverflow;
          } else if (holds(acc, scale)) {
            const int exponent = nearest(std::fabs(acc), scale, scale + 7) - scale;
            const uint32_t entry = at % 4096 << 4 | (acc < 0) << 3 | exponent;
            put(out, layout.entries + 2 * count++, static_cast<uint16_t>(entry));
            const auto value = static_cast<float>(
                std::copysign(std::ldexp(1, scale + exponent), static_cast<double>(acc)));
            left = add(acc, -value);
            CHECK(static_cast<double>(left) + value == acc, "conservation, exactly: %a", acc);
          }
        }
      }
      CHECK(bits(residual[i]) == bits(left), "residual[%ld]: %a, got %a", long(i), left,
            residual[i]);
    }
    put(out, layout.starts + 4 * blocks, static_cast<uint32_t>(count));
    std::memset(out, 0, 64);
    std::memcpy(out, "DCT1\2\0\3", 7);
    put(out, 7, flags);
    put(out, 8, numel);
    put(out, 16, static_cast<uint32_t>(c.capacity));
    put(out, 20, static_cast<uint32_t>(count));
    put(out, 24, static_cast<uint8_t>(scale + 127));
  }
  for (int64_t i = 0; i < payload.size(); ++i) {
    CHECK(payload.data()[i] == expected.data()[i], "byte %ld of range %ld", long(i % layout.nbytes),
          long(i / layout.nbytes));
  }
  CHECK(seen == passed, "seen");
  return payload;
}

// Adds one payload to `sum` as docs/reference/payload.md says; returns its status.
int32_t read(const uint8_t* in, const E3M0Layout& layout, int64_t numel, int64_t capacity,
             float* sum) {
  const int64_t count = get<uint32_t>(in, 20), exponent = get<uint64_t>(in, 24);
  bool ok = std::memcmp(in, "DCT1\2\0\3", 7) == 0 && in[7] < 8 && get<int64_t>(in, 8) == numel &&
            get<uint32_t>(in, 16) == capacity && count <= capacity && count <= numel &&
            exponent >= 1 && exponent <= 247;
  for (int i = 32; i < 64; ++i) ok = ok && in[i] == 0;
  if (!ok) return kStatusHeader;
  const int64_t blocks = num_blocks(numel);
  if (blocks == 0) return get<uint32_t>(in, layout.starts) != 0 ? kStatusStarts : 0;
  int32_t status = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t first = get<uint32_t>(in, layout.starts + 4 * b);
    const int64_t end = get<uint32_t>(in, layout.starts + 4 * b + 4);
    int64_t edges[5] = {first, 0, 0, 0, end};
    for (int q = 0; q < 3; ++q) {
      edges[q + 1] = first + get<uint16_t>(in, layout.sub_starts + 2 * (3 * b + q));
    }
    if (!std::is_sorted(edges, edges + 5) || end > count || (b == 0 && first != 0) ||
        (b + 1 == blocks && end != count)) {
      status |= kStatusStarts;
      continue;
    }
    std::vector<std::pair<int64_t, float>> found;
    bool sound = true;
    for (int q = 0; q < 4; ++q) {
      for (int64_t e = edges[q], last = -1; e < edges[q + 1]; ++e) {
        const int64_t entry = get<uint16_t>(in, layout.entries + 2 * e), position = entry >> 4;
        const int64_t index = b * kBlock + q * 4096 + position;
        sound = sound && position > last && index < numel;
        last = position;
        const double magnitude = std::ldexp(1, static_cast<int>(exponent - 127 + (entry & 7)));
        found.emplace_back(index, static_cast<float>((entry & 8) != 0 ? -magnitude : magnitude));
      }
    }
    if (!sound) status |= kStatusPositions;
    for (const auto& [index, value] : found) {
      if (sound) sum[index] = add(sum[index], value);
    }
  }
  if ((in[7] & kFlagNonFinite) != 0) sum[0] = NAN;
  return status;
}

void damage(Random& random, uint8_t* out, const E3M0Layout& layout) {
  const int64_t ends[] = {64, layout.sub_starts, layout.entries, layout.nbytes, layout.nbytes};
  const int64_t begins[] = {0, layout.starts, layout.sub_starts, layout.entries, 0};
  for (int64_t hits = random.integer(1, 3); hits > 0; --hits) {
    const int64_t section = random.integer(0, 4);
    const int64_t at = random.integer(begins[section], ends[section] - 1);
    out[at] = random.chance(0.5) ? static_cast<uint8_t>(random.integer(0, 255))
                                 : out[at] ^ (1 << random.integer(0, 7));
  }
}

// Two payloads of a case, one of them damaged now and then.
void unpacked(Random& random, const Case& c, AlignedBytes payload) {
  const E3M0Layout layout = e3m0_layout(c.numel, c.capacity, c.ranges);
  AlignedBytes both(2 * payload.size(), 0);
  for (int64_t p = 0; p < 2; ++p) {
    std::memcpy(both.data() + p * payload.size(), payload.data(), payload.size());
  }
  std::vector<float> sum(c.numel, 0.0f), out(c.numel, 7.0f);
  std::vector<int32_t> expected(2, 0), status(2, -1);
  for (int64_t p = 0; p < 2; ++p) {
    for (int64_t r = 0; r < c.ranges; ++r) {
      uint8_t* row = both.data() + (p * c.ranges + r) * layout.nbytes;
      if (random.chance(0.4)) damage(random, row, layout);
      const Range range = range_bounds(c.numel, c.ranges, r);
      expected[p] |=
          read(row, layout, range.end - range.begin, c.capacity, sum.data() + range.begin);
    }
  }
  ScatterUnpackArgs args{};
  args.payloads = both.data();
  args.ranks = 2;
  args.ranges = c.ranges;
  args.capacity = c.capacity;
  args.value_dtype = DType::kE3M0;
  args.out = out.data();
  args.out_dtype = DType::kFloat32;
  args.numel = c.numel;
  args.scale = 1.0f;
  args.status = status.data();
  with_threads(c.threads, [&](const cpu::Parallel& p) { cpu::scatter_unpack(args, p); });
  CHECK(status == expected, "status");
  for (int64_t i = 0; i < c.numel; ++i) {
    CHECK(out[i] == sum[i] || (std::isnan(out[i]) && std::isnan(sum[i])), "out[%ld]: %a, got %a",
          long(i), sum[i], out[i]);
  }
}

}  // namespace

int main() {
  Random random(3);
  for (int64_t numel : {0, 1, 64, 4095, 4096, 4097, 16383, 16384, 16385, 28673, 50000}) {
    for (int repeat = 0; repeat < 6; ++repeat) {
      const Case c = random_case(random, numel);
      const AlignedBytes payload = packed(c);
      for (int again = 0; again < 3; ++again) unpacked(random, c, payload);
    }
  }
  // So many entries that they are moved in parallel, and 13 bits in every sub-start.
  Case large = random_case(random, 400'000);
  large.ranges = 1;
  large.threads = 3;
  large.capacity = 330'000;
  large.segments = {0, large.numel};
  large.tau = {0.0f};
  large.scale = {0.01f};
  unpacked(random, large, packed(large));
}
