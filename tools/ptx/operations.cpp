// operations.cpp -- what each opcode does, by its full name. Only what kernels use is here.
#include "forms.h"
#include "functors.h"

namespace ptx {
namespace {

// --- Forms

// Of the lowest bytes of wider registers. What is left of the result's is the sign's, or 0.
template <typename To, typename From>
void run_wide(char* registers, const Instruction& i, uint32_t lanes) {
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    From from;
    std::memcpy(&from, registers + i.from[0].at + lane * i.from[0].bytes, sizeof(From));
    const To to = Convert<To>()(from);
    char* const target = registers + i.to[0].at + lane * i.to[0].bytes;
    const bool negative = std::is_signed_v<To> && !std::is_floating_point_v<To> && to < To{0};
    std::memset(target, negative ? 0xff : 0, i.to[0].bytes);
    std::memcpy(target, &to, sizeof(To));
  }
}

// mov to or from several narrower registers, the lowest first.
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

// --- The table

class Table {
 public:
  Forms forms;

  Table() {
    of_two<Add, int16_t, int32_t, int64_t, float>("add.");
    of_two<Subtract, int16_t, int32_t, int64_t>("sub.");
    of_two<Min, int32_t, int64_t, uint16_t, uint32_t, uint64_t, float, double>("min.");
    of_two<Max, int32_t, int64_t, uint16_t, uint32_t, uint64_t, float, double>("max.");
    of_two<Multiply, int16_t, int32_t, int64_t>("mul.lo.");
    of_two<MultiplyHigh, int32_t, int64_t, uint16_t, uint32_t>("mul.hi.");
    of_two<Divide, int32_t, int64_t, uint32_t, uint64_t>("div.");
    of_two<Remainder, int32_t, int64_t, uint32_t, uint64_t>("rem.");
    of_two<Add, float>("add.rn.");
    of_two<Subtract, float>("sub.rn.");
    of_two<Multiply, float, double>("mul.rn.");
    of_two<Divide, float>("div.rn.");
    forms["fma.rn.f32"] = form<FusedMultiplyAdd, float, float, float, float>();
    forms["min.relu.s32"] = form<MinAboveZero, int32_t, int32_t, int32_t>();
    forms["max.relu.s32"] = form<MaxAndZero, int32_t, int32_t, int32_t>();
    forms["abs.f32"] = form<Absolute, float, float>();
    forms["neg.s32"] = form<Negate, int32_t, int32_t>();
    forms["neg.s64"] = form<Negate, int64_t, int64_t>();
    forms["neg.f32"] = form<Negate, float, float>();
    forms["mul.wide.u16"] = form<MultiplyWide, uint32_t, uint16_t, uint16_t>();
    forms["mul.wide.s32"] = form<MultiplyWide, int64_t, int32_t, int32_t>();
    forms["mul.wide.u32"] = form<MultiplyWide, uint64_t, uint32_t, uint32_t>();
    forms["mad.wide.s32"] = form<MultiplyAddWide, int64_t, int32_t, int32_t, int64_t>();
    forms["mad.wide.u32"] = form<MultiplyAddWide, uint64_t, uint32_t, uint32_t, uint64_t>();
    forms["mad.lo.s32"] = form<MultiplyAdd, uint32_t, uint32_t, uint32_t, uint32_t>();
    forms["mad.lo.s64"] = form<MultiplyAdd, uint64_t, uint64_t, uint64_t, uint64_t>();

    each_bits<And>("and.");
    each_bits<Or>("or.");
    each_bits<Xor>("xor.");
    for_bits("not.", form<Not, uint16_t, uint16_t>(), form<Not, uint32_t, uint32_t>(),
             form<Not, uint64_t, uint64_t>());
    forms["not.pred"] = form<NotPredicate, uint8_t, uint8_t>();
    for_bits("shl.", form<ShiftLeft, uint16_t, uint16_t, uint32_t>(),
             form<ShiftLeft, uint32_t, uint32_t, uint32_t>(),
             form<ShiftLeft, uint64_t, uint64_t, uint32_t>());
    shift_right<int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t>("shr.");
    forms["popc.b32"] = form<CountOnes, uint32_t, uint32_t>();
    forms["brev.b32"] = form<Reverse, uint32_t, uint32_t>();
    forms["bfind.shiftamt.u32"] = form<FindShift, uint32_t, uint32_t>();
    forms["bfi.b32"] = form<Insert, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>();
    forms["bfi.b64"] = form<Insert, uint64_t, uint64_t, uint64_t, uint32_t, uint32_t>();
    forms["bfe.u32"] = form<Extract, uint32_t, uint32_t, uint32_t, uint32_t>();
    forms["bfe.s32"] = form<Extract, int32_t, int32_t, uint32_t, uint32_t>();
    forms["shf.l.wrap.b32"] = form<FunnelLeft, uint32_t, uint32_t, uint32_t, uint32_t>();
    forms["prmt.b32"] = form<Permute, uint32_t, uint32_t, uint32_t, uint32_t>();

    comparisons();
    for (const char* letter : {"b", "u", "s", "f"}) {
      const std::string l = letter;
      forms["selp." + l + "16"] = form<Select, uint16_t, uint16_t, uint16_t, uint8_t>();
      forms["selp." + l + "32"] = form<Select, uint32_t, uint32_t, uint32_t, uint8_t>();
      forms["selp." + l + "64"] = form<Select, uint64_t, uint64_t, uint64_t, uint8_t>();
      forms["mov." + l + "16"] = form<Copy, uint16_t, uint16_t>();
      forms["mov." + l + "32"] = form<Copy, uint32_t, uint32_t>();
      forms["mov." + l + "64"] = form<Copy, uint64_t, uint64_t>();
    }
    forms["unpack"] = {unpack, {}, {}};
    forms["pack"] = {pack, {}, {}};
    forms["mov.pred"] = form<Copy, uint8_t, uint8_t>();
    forms["cvta.to.global.u64"] = form<Copy, uint64_t, uint64_t>();

    conversions_among<int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t>();
    conversions_to<float, int16_t, int32_t, int64_t, uint32_t, uint64_t>("cvt.rn.");
    conversions_to<double, int64_t, uint64_t>("cvt.rn.");
    conversions_to<int32_t, float, double>("cvt.rzi.");
    conversions_to<uint32_t, double>("cvt.rzi.");
    forms["cvt.rpi.f64.f64"] = form<Ceiling, double, double>();
    add_halves(forms);
    add_collectives(forms);
  }

 private:
  template <typename T>
  static std::string type() {
    const char* letter = std::is_floating_point_v<T> ? "f" : std::is_signed_v<T> ? "s" : "u";
    return letter + std::to_string(8 * sizeof(T));
  }
  template <typename F, typename... T>
  void of_two(const std::string& name) {
    ((forms[name + type<T>()] = form<F, T, T, T>()), ...);
  }
  template <typename... T>
  void shift_right(const std::string& name) {
    ((forms[name + type<T>()] = form<ShiftRight, T, T, uint32_t>()), ...);
  }
  void for_bits(const std::string& name, const Form& of16, const Form& of32, const Form& of64) {
    forms[name + "b16"] = of16;
    forms[name + "b32"] = of32;
    forms[name + "b64"] = of64;
  }
  template <typename F>
  void each_bits(const std::string& name) {
    for_bits(name, form<F, uint16_t, uint16_t, uint16_t>(), form<F, uint32_t, uint32_t, uint32_t>(),
             form<F, uint64_t, uint64_t, uint64_t>());
    forms[name + "pred"] = form<F, uint8_t, uint8_t, uint8_t>();
  }

  template <typename F, typename... T>
  void compare(const std::string& name) {
    ((forms["setp." + name + "." + type<T>()] = form<F, uint8_t, T, T>()), ...);
  }
  template <typename F, typename IfNot>
  void compare_all(const std::string& name) {
    compare<F, int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t, float>(name);
    compare<Unordered<IfNot>, float>(name + "u");
  }
  void comparisons() {
    compare_all<Equal, NotEqual>("eq");
    compare_all<NotEqual, Equal>("ne");
    compare_all<Less, GreaterEqual>("lt");
    compare_all<LessEqual, Greater>("le");
    compare_all<Greater, LessEqual>("gt");
    compare_all<GreaterEqual, Less>("ge");
    compare<Unordered<Numbers>, float>("nan");
    for (const char* bits : {"16", "32", "64"}) {
      for (const char* name : {"setp.eq.", "setp.ne."}) {
        forms[std::string(name) + "b" + bits] = forms[std::string(name) + "u" + bits];
      }
    }
  }

  template <typename To, typename From>
  void convert(const std::string& name) {
    Form converts = form<Convert<To>, To, From>();
    converts.run_wide = run_wide<To, From>;
    forms[name + type<To>() + "." + type<From>()] = converts;
  }
  template <typename To, typename... From>
  void conversions_to(const std::string& name) {
    (convert<To, From>(name), ...);
  }
  template <typename... T>
  void conversions_among() {
    (conversions_to<T, T...>("cvt."), ...);
  }
};

template <typename T, typename F>
uint64_t update(uint64_t old, uint64_t operand) {
  return F()(static_cast<T>(old), static_cast<T>(operand));
}

}  // namespace

const Form* find_form(const std::string& opcode) {
  static const Table table;
  const auto found = table.forms.find(opcode);
  return found == table.forms.end() ? nullptr : &found->second;
}

Update find_update(const std::string& operation) {
  static const std::unordered_map<std::string, Update> updates = {
      {"add.u32", update<uint32_t, Add>},
      {"add.u64", update<uint64_t, Add>},
      {"or.b32", update<uint32_t, Or>},
  };
  const auto found = updates.find(operation);
  return found == updates.end() ? nullptr : found->second;
}

}  // namespace ptx
