#pragma once

// Compares the ops that read packed or quantized rows with reference decoders, column by column.

#include "../../csrc/cpu/kernels.h"
#include "fuzz_input.h"
#include "positions_oracle.h"
#include "row_oracle.h"

namespace dct::test {

inline DType pick_dtype(Setting& setting) {
  return setting.pick({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
}

// The values of floats(), converted to T.
template <typename T>
const std::vector<T>& values_of() {
  static const std::vector<T> pool = [] {
    std::vector<T> made;
    for (float x : floats()) made.push_back(make<T>(x));
    return made;
  }();
  return pool;
}

// row_unpack with untrusted values and positions, and row_gather with untrusted positions.
class PackedRows : public Target {
 public:
  explicit PackedRows(bool gather) : gather_(gather) {}

  Input sound(Random& random) const override {
    Input input{static_cast<uint32_t>(random.integer(0, 0xffffffff)), {}};
    const Call call(input.setting);
    std::vector<uint8_t> positions(call.rows * call.bytes);
    const std::vector<float> x = random.reals<float>(call.rows * call.width);
    dispatch(call.value, [&](auto value) {
      std::vector<decltype(value)> values(call.rows * call.k);
      with_tasks(1, [&](const cpu::Parallel& parallel) {
        cpu::row_pack({x.data(), DType::kFloat32, call.rows, call.width, call.k, values.data(),
                       call.value, positions.data()},
                      parallel);
      });
      const auto* raw = reinterpret_cast<const uint8_t*>(values.data());
      input.bytes = positions;
      if (!gather_) input.bytes.insert(input.bytes.end(), raw, raw + values.size() * sizeof(value));
    });
    return input;
  }

  bool run(Input& input, Memory& memory) const override {
    const Call call(input.setting);
    return dispatch(call.value, [&](auto value) {
      return dispatch(call.dense, [&](auto dense) {
        return call_op<decltype(value), decltype(dense)>(call, input, memory);
      });
    });
  }

  Field field(Random& random, const Input& input) const override {
    const Call call(input.setting);
    const int size = position_encoding(call.width, call.k) == PositionEncoding::kUint16 ? 2 : 1;
    return {size * random.integer(0, call.rows * call.bytes / size - 1), size};
  }

 private:
  struct Call {
    explicit Call(uint32_t number) {
      Setting setting(number);
      width = setting.pick<int64_t>({64, 9, 65, 8, 128, 1, 63, 256, 7, 257, 300, 2000});
      const int64_t part = setting.pick<int64_t>({20, 2, 9, 1, 1000});
      k = std::max<int64_t>(width / (width == 2000 ? 50 : part), 1);
      rows = setting.pick<int64_t>({1, 2, 3});
      value = pick_dtype(setting);
      dense = pick_dtype(setting);
      tasks = setting.pick<int64_t>({1, 2});
      offset = setting.pick<int64_t>({0, 1});
      bytes = position_bytes(width, k);
    }
    int64_t width, k, rows, bytes, tasks, offset;
    DType value, dense;
  };

  template <typename Value, typename Dense>
  bool call_op(const Call& call, Input& input, Memory& memory) const {
    const int64_t slots = call.rows * call.k, cells = call.rows * call.width;
    const int64_t position_bytes = call.rows * call.bytes;
    input.bytes.resize(position_bytes + (gather_ ? 0 : slots * sizeof(Value)));
    auto* positions = memory.take<uint8_t>(position_bytes, call.offset);
    std::copy_n(input.bytes.begin(), position_bytes, positions);
    auto* values = memory.take<Value>(slots);
    auto* dense = memory.take<Dense>(cells);
    if (gather_) {
      std::copy_n(values_of<Dense>().begin(), cells, dense);
      std::fill_n(values, slots, make<Value>(7));
    } else {
      std::memcpy(values, input.bytes.data() + position_bytes, slots * sizeof(Value));
      std::fill_n(dense, cells, make<Dense>(7));
    }
    with_tasks(call.tasks, [&](const cpu::Parallel& parallel) {
      if (gather_) {
        cpu::row_gather(
            {dense, call.dense, positions, call.rows, call.width, call.k, values, call.value},
            parallel);
      } else {
        cpu::row_unpack(
            {values, call.value, positions, call.rows, call.width, call.k, dense, call.dense},
            parallel);
      }
    });
    const bool sound =
        gather_ ? check_gathered(dense, positions, call.rows, call.width, call.k, values)
                : check_unpacked(values, positions, call.rows, call.width, call.k, dense);
    CHECK(std::equal(positions, positions + position_bytes, input.bytes.begin()),
          "the positions were written to");
    return sound;
  }

  bool gather_;
};

class RowDequantize : public Target {
 public:
  explicit RowDequantize(bool sum) : sum_(sum) {}

  Input sound(Random& random) const override {
    Input input{static_cast<uint32_t>(random.integer(0, 0xffffffff)), {}};
    const Call call(input.setting, sum_);
    const int64_t rows = call.ranks * call.rows;
    input.bytes.resize(rows * call.bytes);
    const std::vector<float> x = random.reals<float>(rows * call.width);
    with_tasks(1, [&](const cpu::Parallel& parallel) {
      cpu::row_quantize(
          {x.data(), DType::kFloat32, rows, call.width, call.format, input.bytes.data()}, parallel);
    });
    return input;
  }

  bool run(Input& input, Memory& memory) const override {
    const Call call(input.setting, sum_);
    return dispatch(call.out,
                    [&](auto out) { return dequantize<decltype(out)>(call, input, memory); });
  }

  Field field(Random& random, const Input& input) const override {
    const Call call(input.setting, sum_);
    return {random.integer(1, call.ranks * call.rows) * call.bytes - 2, 2};  // a scale
  }

 private:
  struct Call {
    Call(uint32_t number, bool sum) {
      Setting setting(number);
      format = setting.pick({RowFormat::kInt8, RowFormat::kInt4, RowFormat::kSign});
      width = setting.pick<int64_t>({64, 1, 33, 5, 31, 7, 32, 128, 9, 63, 65, 2, 320, 257, 1025});
      rows = setting.pick<int64_t>({1, 2, 17, 3});
      if (rows * width > 2000) rows = 2;
      out = pick_dtype(setting);
      tasks = setting.pick<int64_t>({1, 2});
      offset = setting.pick<int64_t>({0, 1, 7});
      bytes = row_bytes(width, format);
      ranks = sum ? setting.pick<int64_t>({2, 1, 5}) : 1;
    }
    RowFormat format;
    int64_t width, rows, bytes, tasks, offset, ranks;
    DType out;
  };

  template <typename Out>
  bool dequantize(const Call& call, Input& input, Memory& memory) const {
    const int64_t message_bytes = call.rows * call.bytes, nbytes = call.ranks * message_bytes;
    input.bytes.resize(nbytes);
    auto* rows = memory.take<uint8_t>(nbytes, call.offset);
    std::copy_n(input.bytes.begin(), nbytes, rows);
    Out* out = memory.take<Out>(call.rows * call.width);
    with_tasks(call.tasks, [&](const cpu::Parallel& parallel) {
      if (sum_) {
        cpu::row_dequantize_sum(
            {rows, call.ranks, call.rows, call.width, call.format, out, call.out}, parallel);
      } else {
        cpu::row_dequantize({rows, call.rows, call.width, call.format, out, call.out}, parallel);
      }
    });
    for (int64_t row = 0; row < call.rows; ++row) {
      for (int64_t c = 0; c < call.width; ++c) {
        float total = 0;
        for (int64_t p = 0; p < call.ranks; ++p) {
          const uint8_t* own = rows + p * message_bytes + row * call.bytes;
          const float scale = from_bits((own[call.bytes - 2] | own[call.bytes - 1] << 8) * 65536u);
          const float entry = static_cast<float>(code_at(own, c, call.format)) * scale;
          total = p == 0 ? entry : total + entry;
        }
        const Out wanted = make<Out>(total);
        CHECK(bits(out[row * call.width + c]) == bits(wanted), "row %ld, column %ld", long(row),
              long(c));
      }
    }
    CHECK(std::equal(rows, rows + nbytes, input.bytes.begin()), "the rows were written to");
    return true;  // any bytes are valid
  }

  bool sum_;
};

}  // namespace dct::test
