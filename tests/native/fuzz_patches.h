#pragma once

// Compares the readers of weight patches with a decoder that follows docs/reference/payload.md.

#include "../../csrc/common/patch.h"
#include "../../csrc/cpu/kernels.h"
#include "fuzz_payloads.h"

namespace dct::test {

// Applies a patch to the bits of weights, and returns its status.
inline int32_t apply_patch(const std::vector<uint8_t>& bytes, DType dtype,
                           std::vector<uint16_t>& weights) {
  const auto numel = static_cast<int64_t>(weights.size()), blocks = (numel + 4095) / 4096;
  const auto nbytes = static_cast<int64_t>(bytes.size()), at = 64 + 4 * blocks;
  const auto number = [&](int64_t offset) { return bytes[offset] | bytes[offset + 1] << 8; };
  if (nbytes < at) return 1;
  uint8_t header[64] = {'D', 'C', 'T', '1', 5, 0, uint8_t(dtype == DType::kBFloat16 ? 1 : 2)};
  header[7] = bytes[7] & 1;
  std::memcpy(header + 8, &numel, 8);
  std::memcpy(header + 16, bytes.data() + 16, 8);
  if (std::memcmp(header, bytes.data(), 64) != 0) return 1;
  if (bytes[7] == 1) return 8;
  uint32_t sizes[2];  // capacity and count
  std::memcpy(sizes, header + 16, 8);
  int64_t left = sizes[1];
  if (sizes[1] > sizes[0] || at + 2 * left > nbytes) return 1;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t entries = number(64 + 4 * b), words = number(66 + 4 * b);
    if (entries > std::min<int64_t>(numel - 4096 * b, 4096)) return 2;
    if (words < entries || words > 2 * entries) return 2;
    left -= words;
  }
  if (left != 0) return 2;
  int32_t status = 0;
  for (int64_t b = 0, first = at; b < blocks; first += 2 * number(66 + 4 * b++)) {
    const int64_t entries = number(64 + 4 * b), words = number(66 + 4 * b);
    std::vector<uint16_t> block(weights.begin() + 4096 * b,
                                weights.begin() + std::min(numel, 4096 * (b + 1)));
    int64_t value = entries, last = -1;
    bool ok = true;
    for (int64_t i = 0; i < entries && ok; ++i) {
      const int64_t position = number(first + 2 * i) / 16, code = number(first + 2 * i) % 16;
      ok = position > last && position < int64_t(block.size()) && (code != 8 || value < words);
      if (!ok) break;
      last = position;
      block[position] =
          code == 8 ? number(first + 2 * value++) : block[position] + (code < 8 ? code : code - 16);
    }
    ok = ok && value == words;
    if (ok) std::copy(block.begin(), block.end(), weights.begin() + 4096 * b);
    if (!ok) status = 4;
  }
  return status;
}

class Patch : public Target {
  struct Call {
    explicit Call(uint32_t number) {
      Setting setting(number);
      numel = setting.pick<int64_t>({40, 5, 300, 1, 0, 4095, 40, 4097, 8192 + 70});
      dtype = setting.pick({DType::kBFloat16, DType::kFloat16});
      tasks = setting.pick<int64_t>({1, 3});
      removed = setting.pick<int64_t>({0, 0, 0, 0, 1, 2, 30, 70});  // bytes at the end
    }
    int64_t numel, tasks, removed;
    DType dtype;
  };

 public:
  explicit Patch(bool applies) : applies_(applies) {}

  Input sound(Random& random) const override {
    Input input{static_cast<uint32_t>(random.integer(0, 0xffffffff)), {}};
    const Call call(input.setting);
    std::vector<uint16_t> before(call.numel), now;
    for (uint16_t& bits : before) bits = static_cast<uint16_t>(random.integer(0, 0xffff));
    now = before;
    const double density = random.pick({0.02, 0.3, 1.0});
    for (uint16_t& bits : now) bits += random.chance(density) ? random.integer(-10, 10) : 0;
    const int64_t capacity = random.pick<int64_t>({2 * call.numel + 1, 2 * call.numel + 1, 20});
    AlignedBytes patch(patch_bytes(call.numel, capacity), 0);
    DiffPackArgs args{now.data(), call.dtype,   before.data(), call.dtype,
                      call.numel, patch.data(), nullptr,       capacity};
    with_tasks(call.tasks, [&](const cpu::Parallel& parallel) { cpu::diff_pack(args, parallel); });
    input.bytes.assign(patch.data(), patch.data() + patch.size());
    return input;
  }

  bool run(Input& input, Memory& memory) const override {
    const Call call(input.setting);
    const int64_t nbytes = std::max<int64_t>(input.bytes.size() - call.removed, 0);
    const uint8_t* patch = received(input, nbytes, memory);
    auto* status = memory.take<int32_t>(1);
    auto* weights = memory.take<uint16_t>(call.numel);
    for (int64_t i = 0; i < call.numel; ++i) weights[i] = static_cast<uint16_t>(40503 * i);
    std::vector<uint16_t> before(weights, weights + call.numel), applied = before;
    with_tasks(call.tasks, [&](const cpu::Parallel& parallel) {
      const PatchApplyArgs args{patch,      nbytes, call.numel,
                                call.dtype, status, applies_ ? weights : nullptr};
      cpu::patch_apply(args, parallel);
    });
    const int32_t wanted = apply_patch(input.bytes, call.dtype, applied);
    const std::vector<uint16_t>& expected = applies_ ? applied : before;
    CHECK(std::equal(expected.begin(), expected.end(), weights), "wrong weights");
    check_unchanged(patch, input);
    return check_status(status, {wanted});
  }

  Field field(Random& random, const Input& input) const override {
    const int64_t blocks = patch_blocks(Call(input.setting).numel);
    if (random.chance(0.4)) return {64 + 2 * random.integer(0, 2 * blocks), 2};
    const auto last = static_cast<int64_t>(input.bytes.size()) / 2 - 1;
    if (random.chance(0.5) && last > 32) return {2 * random.integer(32, last), 2};
    return header_field(random);
  }

 private:
  bool applies_;
};

}  // namespace dct::test
