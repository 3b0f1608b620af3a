#pragma once

// Compares the readers of payloads with decoders that follow docs/reference/payload.md.

#include "../../csrc/cpu/kernels.h"
#include "fuzz_input.h"
#include "payload_oracle.h"
#include "sparse_oracle.h"

namespace dct::test {

// A random field of the header.
inline Field header_field(Random& random) {
  return random.pick<Field>(
      {{0, 4}, {4, 2}, {6, 1}, {7, 1}, {8, 8}, {16, 4}, {20, 4}, {24, 8}, {56, 8}});
}

// Resizes the untrusted bytes for the call, and copies them into guarded memory.
inline uint8_t* received(Input& input, int64_t nbytes, Memory& memory, int64_t offset = 0) {
  input.bytes.resize(nbytes);
  auto* bytes = memory.take<uint8_t>(nbytes, offset);
  std::copy_n(input.bytes.begin(), nbytes, bytes);
  return bytes;
}

inline void check_unchanged(const uint8_t* bytes, const Input& input) {
  CHECK(std::equal(input.bytes.begin(), input.bytes.end(), bytes), "the input was written to");
}

inline bool check_status(const int32_t* status, const std::vector<int32_t>& expected) {
  bool sound = true;
  for (size_t p = 0; p < expected.size(); ++p) {
    CHECK(status[p] == expected[p], "status %d, got %d", expected[p], status[p]);
    sound = sound && expected[p] == 0;
  }
  return sound;
}

class ScatterUnpack : public Target {
  struct Call {
    explicit Call(uint32_t number) {
      Setting setting(number);
      numel = setting.pick<int64_t>({300, 40, 70, 5, 300, 1, 1000, 40, 0, 16385, 300, 40, 32771});
      ranks = setting.pick<int64_t>({1, 2, 1, 3});
      ranges = setting.pick<int64_t>({1, 2, 1, 3});
      capacity = setting.pick<int64_t>({16, 3, 40, 1});
      value = setting.pick({DType::kFloat32, DType::kBFloat16});
      out = setting.pick({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
      tasks = setting.pick<int64_t>({1, 3});
      scale = setting.pick({1.0f, 1.0f / 3, -0.5f});
      layout = payload_layout(numel, capacity, value, ranges);
    }
    int64_t numel, ranks, ranges, capacity, tasks;
    DType value, out;
    float scale;
    PayloadLayout layout;
  };

 public:
  Input sound(Random& random) const override {
    Input input{static_cast<uint32_t>(random.integer(0, 0xffffffff)), {}};
    const Call call(input.setting);
    AlignedBytes payload(call.layout.nbytes, 0);
    for (int64_t i = 0; i < call.ranks * call.ranges; ++i) {
      const Range range = range_bounds(call.numel, call.ranges, i % call.ranges);
      dispatch_payload_value(call.value, [&](auto value) {
        put_sparse<decltype(value)>(random, payload.data(), call.layout, range.end - range.begin,
                                    call.capacity);
      });
      input.bytes.insert(input.bytes.end(), payload.data(), payload.data() + payload.size());
    }
    return input;
  }

  bool run(Input& input, Memory& memory) const override {
    const Call call(input.setting);
    return dispatch_payload_value(call.value, [&](auto value) {
      return dispatch(call.out, [&](auto out) {
        return unpack<decltype(value), decltype(out)>(call, input, memory);
      });
    });
  }

  Field field(Random& random, const Input& input) const override {
    const Call call(input.setting);
    const int64_t payload = random.integer(0, call.ranks * call.ranges - 1) * call.layout.nbytes;
    Field field = header_field(random);
    if (random.chance(0.4)) {
      const int64_t blocks = range_blocks(call.numel, call.ranges);
      field = {call.layout.starts + 4 * random.integer(0, blocks), 4};
    } else if (random.chance(0.5)) {
      field = {call.layout.positions + 2 * random.integer(0, call.capacity - 1), 2};
    }
    return {payload + field.offset, field.bytes};
  }

 private:
  template <typename Value, typename Out>
  static bool unpack(const Call& call, Input& input, Memory& memory) {
    const int64_t nbytes = call.layout.nbytes;
    uint8_t* payloads = received(input, call.ranks * call.ranges * nbytes, memory);
    Out* out = memory.take<Out>(call.numel);
    auto* status = memory.take<int32_t>(call.ranks);
    std::fill_n(out, call.numel, make<Out>(1.5f));
    std::vector<float> sum(call.numel, 0.0f);
    std::vector<int64_t> touched;
    std::vector<int32_t> expected(call.ranks, 0);
    for (int64_t p = 0; p < call.ranks; ++p) {
      for (int64_t r = 0; r < call.ranges; ++r) {
        const Range range = range_bounds(call.numel, call.ranges, r);
        expected[p] |= read<Value>(payloads + (p * call.ranges + r) * nbytes, call.layout,
                                   range.end - range.begin, call.capacity, [&](int64_t i, float x) {
                                     sum[range.begin + i] = add(sum[range.begin + i], x);
                                     touched.push_back(range.begin + i);
                                   });
      }
    }
    ScatterUnpackArgs args{};
    args.payloads = payloads;
    args.ranks = call.ranks;
    args.ranges = call.ranges;
    args.capacity = call.capacity;
    args.value_dtype = call.value;
    args.out = out;
    args.out_dtype = call.out;
    args.numel = call.numel;
    args.scale = call.scale;
    args.status = status;
    with_tasks(call.tasks,
               [&](const cpu::Parallel& parallel) { cpu::scatter_unpack(args, parallel); });
    const auto rounded = [&](float x) { return make<Out>(add(0.0f, multiply(call.scale, x))); };
    std::vector<Out> wanted(call.numel, rounded(0));
    for (int64_t i : touched) wanted[i] = rounded(sum[i]);
    if (call.numel > 0 && std::memcmp(out, wanted.data(), call.numel * sizeof(Out)) != 0) {
      check_bits("out", out, wanted.data(), call.numel);
    }
    check_unchanged(payloads, input);
    return check_status(status, expected);
  }
};

class DequantizeSum : public Target {
  struct Call {
    explicit Call(uint32_t number) {
      Setting setting(number);
      kind = &kKinds[setting.pick({0, 1, 2, 3, 4})];
      numel = setting.pick<int64_t>({65, 1, 64, 130, 5, 63, 0, 300, 1, 64, 1024, 1030});
      ranks = setting.pick<int64_t>({1, 2, 1, 0, 3});
      ranges = setting.pick<int64_t>({1, 1, 2});
      tasks = setting.pick<int64_t>({1, 3});
      scale = setting.pick({1.0f, 1.0f / 3, -0.5f});
      out = setting.pick({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
      nbytes = bytes_for(*kind, numel, ranges, setting.pick({0, 16}));
      if (setting.pick({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}) == 1) {  // two blocks
        numel += kBlock;
        nbytes = bytes_for(*kind, numel, ranges, 0);
      }
      const bool matrix = numel % ranges == 0 && setting.pick({0, 1}) == 1;
      length = matrix ? numel / ranges : range_length(numel, ranges);
    }
    const Kind* kind;
    int64_t numel, ranks, ranges, tasks, nbytes, length;
    float scale;
    DType out;
  };

 public:
  Input sound(Random& random) const override {
    Input input{static_cast<uint32_t>(random.integer(0, 0xffffffff)), {}};
    const Call call(input.setting);
    AlignedBytes payload(call.nbytes, 0);
    for (int64_t i = 0; i < call.ranks * call.ranges; ++i) {
      const Range range = range_of_length(call.numel, call.length, i % call.ranges);
      std::vector<float> x = random.reals<float>(range.end - range.begin);
      for (float& v : x) v = std::isfinite(v) || random.chance(0.1) ? v : 1;
      put(payload.data(), x, nullptr, *call.kind);
      input.bytes.insert(input.bytes.end(), payload.data(), payload.data() + payload.size());
    }
    return input;
  }

  Field field(Random& random, const Input& input) const override {
    const Call call(input.setting);
    const int64_t count = std::max<int64_t>(call.ranks * call.ranges, 1);
    const int64_t payload = random.integer(0, count - 1) * call.nbytes;
    Field field = header_field(random);
    if (random.chance(0.6) && call.kind->scaled()) {  // a scale
      const int64_t scales = 64 + kGroups * call.kind->code_bytes;
      field = {scales + 2 * random.integer(0, kGroups - 1), 2};
    }
    return {payload + field.offset, field.bytes};
  }

  bool run(Input& input, Memory& memory) const override {
    const Call call(input.setting);
    return dispatch(call.out, [&](auto out) { return sum<decltype(out)>(call, input, memory); });
  }

 private:
  template <typename Out>
  static bool sum(const Call& call, Input& input, Memory& memory) {
    uint8_t* payloads = received(input, call.ranks * call.ranges * call.nbytes, memory);
    Out* out = memory.take<Out>(call.numel);
    auto* status = memory.take<int32_t>(call.ranks);
    DequantizeSumArgs args{};
    args.payloads = payloads;
    args.ranks = call.ranks;
    args.ranges = call.ranges;
    args.range_length = call.length;
    args.nbytes = call.nbytes;
    args.format = call.kind->format;
    args.out = out;
    args.out_dtype = call.out;
    args.numel = call.numel;
    args.scale = call.scale;
    args.status = status;
    args.statuses = 1;
    with_tasks(call.tasks,
               [&](const cpu::Parallel& parallel) { cpu::dequantize_sum(args, parallel); });
    std::vector<int32_t> expected;
    const std::vector<float> total = sum_of(payloads, call.ranks, call.ranges, call.length,
                                            call.nbytes, call.numel, *call.kind, expected);
    std::vector<Out> wanted;
    for (float x : total) wanted.push_back(make<Out>(call.scale * x));
    check_bits("out", out, wanted.data(), call.numel);
    check_unchanged(payloads, input);
    return check_status(status, expected);
  }
};

}  // namespace dct::test
