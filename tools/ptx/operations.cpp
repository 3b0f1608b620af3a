// operations.cpp -- maps full opcodes to operations. Contains only opcodes that kernels use.
#include "forms.h"
#include "functors.h"

namespace ptx {
namespace {

// --- Forms

// Uses the low bytes of wider registers. Results are sign-extended or zero-extended.
template <typename To, typename From>
void run_wide(char* registers, const Instruction& i, uint32_t lanes) {
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    From from;
    std::memcpy(&from, registers + i.from[0].at + lane * i.from[0].bytes, sizeof(From));
    const To to = convert<To>(from);
    char* const target = registers + i.to[0].at + lane * i.to[0].bytes;
    const bool negative = std::is_signed_v<To> && !std::is_floating_point_v<To> && to < To{0};
    std::memset(target, negative ? 0xff : 0, i.to[0].bytes);
    std::memcpy(target, &to, sizeof(To));
  }
}

// mov between a register and several narrower registers, low bytes first.
void unpack(char* registers, const Instruction& i, uint32_t lanes) {
  for_each_lane(lanes, [&](int lane) {
    const char* from = registers + i.from[0].at + lane * i.from[0].bytes;
    for (int part = 0; part < i.count; ++part, from += i.to[part].bytes) {
      std::memcpy(registers + i.to[part].at + lane * i.to[part].bytes, from, i.to[part].bytes);
    }
  });
}
void pack(char* registers, const Instruction& i, uint32_t lanes) {
  for_each_lane(lanes, [&](int lane) {
    char* to = registers + i.to[0].at + lane * i.to[0].bytes;
    for (int part = 0; part < i.count; ++part, to += i.from[part].bytes) {
      std::memcpy(to, registers + i.from[part].at + lane * i.from[part].bytes, i.from[part].bytes);
    }
  });
}

// An operation on the low and the high half of each register.
template <auto f, typename T>
uint32_t both(uint32_t a, uint32_t b) {
  const auto low = static_cast<uint16_t>(f(static_cast<T>(a), static_cast<T>(b)));
  const auto high = static_cast<uint16_t>(f(static_cast<T>(a >> 16), static_cast<T>(b >> 16)));
  return uint32_t{high} << 16 | low;
}

// --- The table

class Table {
 public:
  Forms forms;

  Table() {
    binary<add, int16_t, int32_t, int64_t, float>("add.");
    binary<subtract, int16_t, int32_t, int64_t>("sub.");
    binary<least, int32_t, int64_t, uint16_t, uint32_t, uint64_t, float, double>("min.");
    binary<most, int32_t, int64_t, uint16_t, uint32_t, uint64_t, float, double>("max.");
    binary<multiply, int16_t, int32_t, int64_t>("mul.lo.");
    binary<divide, int64_t, uint32_t>("div.");
    binary<add, float>("add.rn.");
    binary<add_to_zero, float>("add.rz.");
    binary<subtract, float>("sub.rn.");
    binary<multiply, float, double>("mul.rn.");
    binary<divide, float>("div.rn.");
    forms["fma.rn.f32"] = form<fused, float, float, float, float>();
    forms["add.s16x2"] = form<both<add, int16_t>, uint32_t, uint32_t, uint32_t>();
    forms["max.u16x2"] = form<both<most, uint16_t>, uint32_t, uint32_t, uint32_t>();
    forms["min.s16x2.relu"] = form<both<least_above_zero, int16_t>, uint32_t, uint32_t, uint32_t>();
    forms["abs.f32"] = form<absolute, float, float>();
    forms["neg.s32"] = form<negate, int32_t, int32_t>();
    forms["neg.s64"] = form<negate, int64_t, int64_t>();
    forms["neg.f32"] = form<negate, float, float>();
    forms["mul.wide.u16"] = form<multiply_wide, uint32_t, uint16_t, uint16_t>();
    forms["mul.wide.s32"] = form<multiply_wide, int64_t, int32_t, int32_t>();
    forms["mul.wide.u32"] = form<multiply_wide, uint64_t, uint32_t, uint32_t>();
    forms["mad.lo.s32"] = form<multiply_add, uint32_t, uint32_t, uint32_t, uint32_t>();
    forms["mad.lo.s64"] = form<multiply_add, uint64_t, uint64_t, uint64_t, uint64_t>();

    each_bits<bit_and>("and.");
    each_bits<bit_or>("or.");
    each_bits<bit_xor>("xor.");
    for_bits("not.", form<complement, uint16_t, uint16_t>(), form<complement, uint32_t, uint32_t>(),
             form<complement, uint64_t, uint64_t>());
    forms["not.pred"] = form<not_predicate, uint8_t, uint8_t>();
    for_bits("shl.", form<shift_left, uint16_t, uint16_t, uint32_t>(),
             form<shift_left, uint32_t, uint32_t, uint32_t>(),
             form<shift_left, uint64_t, uint64_t, uint32_t>());
    shifts_right<int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t>("shr.");
    forms["popc.b32"] = form<count_ones, uint32_t, uint32_t>();
    forms["brev.b32"] = form<reverse, uint32_t, uint32_t>();
    forms["bfind.shiftamt.u32"] = form<find_shift, uint32_t, uint32_t>();
    forms["bfi.b32"] = form<insert, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>();
    forms["bfi.b64"] = form<insert, uint64_t, uint64_t, uint64_t, uint32_t, uint32_t>();
    forms["bfe.u32"] = form<extract, uint32_t, uint32_t, uint32_t, uint32_t>();
    forms["shf.l.wrap.b32"] = form<funnel_left, uint32_t, uint32_t, uint32_t, uint32_t>();
    forms["prmt.b32"] = form<permute, uint32_t, uint32_t, uint32_t, uint32_t>();

    comparisons();
    for (const char* letter : {"b", "u", "s", "f"}) {
      const std::string l = letter;
      forms["selp." + l + "16"] = form<select, uint16_t, uint16_t, uint16_t, uint8_t>();
      forms["selp." + l + "32"] = form<select, uint32_t, uint32_t, uint32_t, uint8_t>();
      forms["selp." + l + "64"] = form<select, uint64_t, uint64_t, uint64_t, uint8_t>();
      forms["mov." + l + "16"] = form<copy, uint16_t, uint16_t>();
      forms["mov." + l + "32"] = form<copy, uint32_t, uint32_t>();
      forms["mov." + l + "64"] = form<copy, uint64_t, uint64_t>();
    }
    forms["unpack"] = {unpack, {}, {}};
    forms["pack"] = {pack, {}, {}};
    forms["mov.pred"] = form<copy, uint8_t, uint8_t>();
    forms["cvta.to.global.u64"] = form<copy, uint64_t, uint64_t>();

    conversions_among<int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t>();
    conversions_to<float, int16_t, int32_t, int64_t, uint32_t, uint64_t>("cvt.rn.");
    conversions_to<double, int64_t, uint64_t>("cvt.rn.");
    conversions_to<int32_t, float, double>("cvt.rzi.");
    conversions_to<uint32_t, double>("cvt.rzi.");
    forms["cvt.rpi.f64.f64"] = form<ceiling, double, double>();
    add_collectives(forms);
  }

 private:
  template <typename T>
  static std::string type() {
    const char* letter = std::is_floating_point_v<T> ? "f" : std::is_signed_v<T> ? "s" : "u";
    return letter + std::to_string(8 * sizeof(T));
  }
  template <auto f, typename... T>
  void binary(const std::string& name) {
    ((forms[name + type<T>()] = form<f, T, T, T>()), ...);
  }
  template <typename... T>
  void shifts_right(const std::string& name) {
    ((forms[name + type<T>()] = form<shift_right, T, T, uint32_t>()), ...);
  }
  void for_bits(const std::string& name, const Form& of16, const Form& of32, const Form& of64) {
    forms[name + "b16"] = of16;
    forms[name + "b32"] = of32;
    forms[name + "b64"] = of64;
  }
  template <auto f>
  void each_bits(const std::string& name) {
    for_bits(name, form<f, uint16_t, uint16_t, uint16_t>(), form<f, uint32_t, uint32_t, uint32_t>(),
             form<f, uint64_t, uint64_t, uint64_t>());
    forms[name + "pred"] = form<f, uint8_t, uint8_t, uint8_t>();
  }

  template <auto f, typename... T>
  void compare(const std::string& name) {
    ((forms["setp." + name + "." + type<T>()] = form<f, uint8_t, T, T>()), ...);
  }
  template <auto f, auto opposite>
  void compare_all(const std::string& name) {
    compare<f, int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t, float>(name);
    compare<unordered<opposite>, float>(name + "u");
  }
  void comparisons() {
    compare_all<equal, not_equal>("eq");
    compare_all<not_equal, equal>("ne");
    compare_all<less, greater_equal>("lt");
    compare_all<less_equal, greater>("le");
    compare_all<greater, less_equal>("gt");
    compare_all<greater_equal, less>("ge");
    compare<any_nan, float>("nan");
    for (const char* bits : {"16", "32", "64"}) {
      for (const char* name : {"setp.eq.", "setp.ne."}) {
        forms[std::string(name) + "b" + bits] = forms[std::string(name) + "u" + bits];
      }
    }
  }

  template <typename To, typename From>
  void conversion(const std::string& name) {
    Form converts = form<[](From x) { return convert<To>(x); }, To, From>();
    converts.run_wide = run_wide<To, From>;
    forms[name + type<To>() + "." + type<From>()] = converts;
  }
  template <typename To, typename... From>
  void conversions_to(const std::string& name) {
    (conversion<To, From>(name), ...);
  }
  template <typename... T>
  void conversions_among() {
    (conversions_to<T, T...>("cvt."), ...);
  }
};

template <typename T, auto f>
uint64_t update(uint64_t old, uint64_t operand) {
  return static_cast<T>(f(static_cast<T>(old), static_cast<T>(operand)));
}

}  // namespace

const Form* find_form(const std::string& opcode) {
  static const Table table;
  const auto found = table.forms.find(opcode);
  return found == table.forms.end() ? nullptr : &found->second;
}

Update find_update(const std::string& operation) {
  static const std::unordered_map<std::string, Update> updates = {
      {"add.u32", update<uint32_t, add>},
      {"add.u64", update<uint64_t, add>},
      {"or.b32", update<uint32_t, bit_or>},
  };
  const auto found = updates.find(operation);
  return found == updates.end() ? nullptr : found->second;
}

}  // namespace ptx
