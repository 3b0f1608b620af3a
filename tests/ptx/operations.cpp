// operations.cpp -- what each opcode computes, by its full name.
//
// https://docs.nvidia.com/cuda/parallel-thread-execution is the definition. Only what kernels use
// is here; fused multiply-adds are missing on purpose.
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "program.h"

namespace ptx {
namespace {

using std::is_floating_point_v;
using std::numeric_limits;

template <typename To, typename From>
To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &x, sizeof(To));
  return result;
}

template <typename T>
T* lanes_of(char* registers, Operand operand) {
  return reinterpret_cast<T*>(registers + operand.at);
}

template <typename Body>
inline void for_each_lane(uint32_t lanes, Body body) {
  if (lanes == kAllLanes) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) body(lane);
  } else {
    for (; lanes != 0; lanes &= lanes - 1) body(__builtin_ctz(lanes));
  }
}

// --- Arithmetic. What integers overflow to wraps; a result that is not a number has these bits.

template <typename T>
T one_nan(T x) {
  if constexpr (sizeof(T) == 4) return x != x ? bits<T>(0x7fffffffu) : x;
  return x;
}

template <typename T>
using Unsigned = std::make_unsigned_t<T>;

struct Add {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (is_floating_point_v<T>)
      return one_nan(a + b);
    else
      return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
  }
};
struct Subtract {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (is_floating_point_v<T>)
      return one_nan(a - b);
    else
      return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
  }
};
struct Multiply {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (is_floating_point_v<T>)
      return one_nan(a * b);
    else
      return static_cast<T>(uint64_t(a) * uint64_t(b));
  }
};
struct MultiplyHigh {
  template <typename T>
  T operator()(T a, T b) const {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>(Wide{a} * Wide{b} >> (8 * sizeof(T)));
  }
};
struct MultiplyWide {
  template <typename T>
  auto operator()(T a, T b) const {
    using Signed = std::conditional_t<sizeof(T) == 2, int32_t, int64_t>;
    using Wide = std::conditional_t<std::is_signed_v<T>, Signed, Unsigned<Signed>>;
    return static_cast<Wide>(Wide{a} * Wide{b});
  }
};
struct MultiplyAdd {
  template <typename T>
  T operator()(T a, T b, T c) const {
    return static_cast<T>(uint64_t(a) * uint64_t(b) + uint64_t(c));
  }
};
struct Divide {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (is_floating_point_v<T>) {
      return one_nan(a / b);
    } else {
      if (b == 0) return static_cast<T>(-1);  // unspecified; what GPUs give
      if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Subtract()(T{0}, a);
      return a / b;
    }
  }
};
struct Remainder {
  template <typename T>
  T operator()(T a, T b) const {
    if (b == 0 || (std::is_signed_v<T> && b == static_cast<T>(-1))) return b == 0 ? a : 0;
    return a % b;
  }
};

// Of a number and what is not one, the number. -0.0 is less than 0.0.
template <bool kLeast>
struct Extreme {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (is_floating_point_v<T>) {
      using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
      if (a != a) return one_nan(b);
      if (b != b) return a;
      if (a == b) {
        const Bits x = bits<Bits>(a), y = bits<Bits>(b);
        return bits<T>(kLeast ? x | y : x & y);
      }
    }
    return (a < b) == kLeast ? a : b;
  }
};
using Min = Extreme<true>;
using Max = Extreme<false>;

// Signs are bits, those of NaN too.
struct Absolute {
  template <typename T>
  T operator()(T a) const {
    if constexpr (is_floating_point_v<T>)
      return std::fabs(a);
    else
      return a < 0 ? Subtract()(T{0}, a) : a;
  }
};
struct Negate {
  template <typename T>
  T operator()(T a) const {
    if constexpr (is_floating_point_v<T>)
      return -a;
    else
      return Subtract()(T{0}, a);
  }
};

// --- Bits

struct And {
  template <typename T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct Or {
  template <typename T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct Xor {
  template <typename T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};
struct Not {
  template <typename T>
  T operator()(T a) const {
    return static_cast<T>(~a);
  }
};
struct NotPredicate {
  uint8_t operator()(uint8_t a) const { return a ^ 1; }
};
// Amounts beyond the width are as the width.
struct ShiftLeft {
  template <typename T>
  T operator()(T a, uint32_t b) const {
    return b >= 8 * sizeof(T) ? T{0} : static_cast<T>(uint64_t{a} << (b & 63));
  }
};
struct ShiftRight {
  template <typename T>
  T operator()(T a, uint32_t b) const {
    constexpr uint32_t kLast = 8 * sizeof(T) - 1;
    if (b > kLast) return std::is_signed_v<T> ? static_cast<T>(a >> kLast) : T{0};
    return static_cast<T>(a >> (b & kLast));
  }
};
struct CountOnes {
  template <typename T>
  uint32_t operator()(T a) const {
    return __builtin_popcountll(a);
  }
};
struct Reverse {
  uint32_t operator()(uint32_t a) const {
    uint32_t result = 0;
    for (int i = 0; i < 32; ++i) result |= (a >> i & 1) << (31 - i);
    return result;
  }
};
struct FindShift {
  uint32_t operator()(uint32_t a) const { return a == 0 ? ~0u : __builtin_clz(a); }
};
struct Insert {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t position, uint32_t length) const {
    position &= 255, length &= 255;
    for (uint32_t i = 0; i < length && position + i < 32; ++i) {
      const uint32_t bit = 1u << (position + i);
      b = (a >> i & 1) != 0 ? b | bit : b & ~bit;
    }
    return b;
  }
};
// Each nibble of `selector` names a byte of {b, a}; its top bit asks for that byte's sign instead.
struct Permute {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t selector) const {
    const uint64_t both = uint64_t{b} << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
      const uint32_t nibble = selector >> (4 * i) & 15;
      uint32_t byte = both >> (8 * (nibble & 7)) & 255;
      if ((nibble & 8) != 0) byte = byte >= 128 ? 255 : 0;
      result |= byte << (8 * i);
    }
    return result;
  }
};

// --- Comparison and selection

struct Equal {
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return a == b;
  }
};
struct NotEqual {  // of floats: and both are numbers
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return (a < b) | (a > b);
  }
};
struct Less {
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return a < b;
  }
};
struct LessEqual {
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return a <= b;
  }
};
struct Greater {
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return a > b;
  }
};
struct GreaterEqual {
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return a >= b;
  }
};
struct Numbers {
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return (a == a) & (b == b);
  }
};
template <typename Opposite>
struct Unordered {  // true as well if one of them is not a number
  template <typename T>
  uint8_t operator()(T a, T b) const {
    return Opposite()(a, b) ^ 1;
  }
};
struct Select {
  template <typename T>
  T operator()(T a, T b, uint8_t which) const {
    return which != 0 ? a : b;
  }
};
struct Copy {
  template <typename T>
  T operator()(T a) const {
    return a;
  }
};

// --- Conversion

struct NoRounding {
  template <typename T>
  T operator()(T x) const {
    return x;
  }
};
struct ToEven {
  template <typename T>
  T operator()(T x) const {
    return std::nearbyint(x);
  }
};
struct ToZero {
  template <typename T>
  T operator()(T x) const {
    return std::trunc(x);
  }
};
struct Down {
  template <typename T>
  T operator()(T x) const {
    return std::floor(x);
  }
};
struct Up {
  template <typename T>
  T operator()(T x) const {
    return std::ceil(x);
  }
};

template <typename To, typename Rounding = NoRounding>
struct Convert {
  template <typename From>
  To operator()(From a) const {
    if constexpr (is_floating_point_v<From> && !is_floating_point_v<To>) {
      const From x = Rounding()(a);
      if (x != x) {
        const bool wide = sizeof(From) == 8 || sizeof(To) == 8;
        return wide ? static_cast<To>(uint64_t{1} << (8 * sizeof(To) - 1)) : To{0};
      }
      // 2 to the power of what To's largest value does not reach: exact, unlike that value itself.
      const From beyond = std::ldexp(From{1}, numeric_limits<To>::digits);
      if (x >= beyond) return numeric_limits<To>::max();
      if (x < static_cast<From>(numeric_limits<To>::min())) return numeric_limits<To>::min();
      return static_cast<To>(x);
    } else if constexpr (is_floating_point_v<From>) {
      return one_nan(static_cast<To>(Rounding()(a)));
    } else {
      return static_cast<To>(a);
    }
  }
};

// --- Forms

template <typename F, typename To, typename... From, size_t... I>
void run(char* registers, const Instruction& i, uint32_t lanes, std::index_sequence<I...>) {
  To* to = lanes_of<To>(registers, i.to[0]);
  const auto from = std::make_tuple(lanes_of<const From>(registers, i.from[I])...);
  for_each_lane(lanes, [&](int lane) { to[lane] = F()(std::get<I>(from)[lane]...); });
}
template <typename F, typename To, typename... From>
Form form() {
  const auto run_all = [](char* registers, const Instruction& i, uint32_t lanes) {
    run<F, To, From...>(registers, i, lanes, std::index_sequence_for<From...>());
  };
  return {run_all, {sizeof(To)}, {sizeof(From)...}};
}

// Of the lowest bytes of wider registers. What is left of the result's is the sign's, or 0.
template <typename F, typename To, typename From>
void run_wide(char* registers, const Instruction& i, uint32_t lanes) {
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    From from;
    std::memcpy(&from, registers + i.from[0].at + lane * i.from[0].bytes, sizeof(From));
    const To to = F()(from);
    char* const target = registers + i.to[0].at + lane * i.to[0].bytes;
    const bool negative = std::is_signed_v<To> && !is_floating_point_v<To> && to < To{0};
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

// --- Collectives: `lanes` are those that take part.

template <typename Combine>
void reduce(char* registers, const Instruction& i, uint32_t lanes) {
  const auto* from = lanes_of<const uint32_t>(registers, i.from[0]);
  uint32_t sum = from[__builtin_ctz(lanes)];
  for (uint32_t left = lanes & (lanes - 1); left != 0; left &= left - 1) {
    sum = Combine()(sum, from[__builtin_ctz(left)]);
  }
  auto* to = lanes_of<uint32_t>(registers, i.to[0]);
  for_each_lane(lanes, [&](int lane) { to[lane] = sum; });
}

uint32_t ballot_of(char* registers, Operand predicate, uint32_t lanes) {
  const auto* from = lanes_of<const uint8_t>(registers, predicate);
  uint32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result |= uint32_t{from[lane]} << lane;
  return result & lanes;
}
void ballot(char* registers, const Instruction& i, uint32_t lanes) {
  const uint32_t result = ballot_of(registers, i.from[0], lanes);
  auto* to = lanes_of<uint32_t>(registers, i.to[0]);
  for_each_lane(lanes, [&](int lane) { to[lane] = result; });
}
template <bool kAll>
void vote(char* registers, const Instruction& i, uint32_t lanes) {
  const uint32_t yes = ballot_of(registers, i.from[0], lanes);
  auto* to = lanes_of<uint8_t>(registers, i.to[0]);
  for_each_lane(lanes, [&](int lane) { to[lane] = kAll ? yes == lanes : yes != 0; });
}

enum class Shuffle { kUp, kDown, kButterfly, kIndex };
template <Shuffle kMode>
void shuffle(char* registers, const Instruction& i, uint32_t lanes) {
  uint32_t before[kLanes];
  std::memcpy(before, registers + i.from[0].at, sizeof(before));
  const auto* b = lanes_of<const uint32_t>(registers, i.from[1]);
  const auto* c = lanes_of<const uint32_t>(registers, i.from[2]);
  auto* to = lanes_of<uint32_t>(registers, i.to[0]);
  for_each_lane(lanes, [&](int lane) {
    const int amount = b[lane] & 31, clamp = c[lane] & 31, segment = c[lane] >> 8 & 31;
    const int last = (lane & segment) | (clamp & ~segment), first = lane & segment;
    int source = 0;
    bool within = false;
    switch (kMode) {
      case Shuffle::kUp:
        source = lane - amount;
        within = source >= last;
        break;
      case Shuffle::kDown:
        source = lane + amount;
        within = source <= last;
        break;
      case Shuffle::kButterfly:
        source = lane ^ amount;
        within = source <= last;
        break;
      case Shuffle::kIndex:
        source = first | (amount & ~segment);
        within = source <= last;
        break;
    }
    if (!within) source = lane;
    // What comes from a lane that takes no part is undefined.
    to[lane] = (lanes >> source & 1) != 0 ? before[source] : 0xdeadbeef;
    if (i.to[1].at != kNone) lanes_of<uint8_t>(registers, i.to[1])[lane] = within;
  });
}

void nothing(char*, const Instruction&, uint32_t) {}

// --- The table

class Table {
 public:
  std::unordered_map<std::string, Form> forms;

  Table() {
    each_integer<Add>("add.");
    each_integer<Subtract>("sub.");
    each_integer<Min>("min.");
    each_integer<Max>("max.");
    each_integer<Multiply>("mul.lo.");
    each_integer<MultiplyHigh>("mul.hi.");
    each_integer<Divide>("div.");
    each_integer<Remainder>("rem.");
    for (const char* rounding : {".", ".rn."}) {
      each_float<Add>(std::string("add") + rounding);
      each_float<Subtract>(std::string("sub") + rounding);
      each_float<Multiply>(std::string("mul") + rounding);
    }
    each_float<Divide>("div.rn.");
    each_float<Min>("min.");
    each_float<Max>("max.");
    one_of_each<Absolute, int16_t, int32_t, int64_t, float, double>("abs.");
    one_of_each<Negate, int16_t, int32_t, int64_t, float, double>("neg.");
    forms["mul.wide.s16"] = form<MultiplyWide, int32_t, int16_t, int16_t>();
    forms["mul.wide.u16"] = form<MultiplyWide, uint32_t, uint16_t, uint16_t>();
    forms["mul.wide.s32"] = form<MultiplyWide, int64_t, int32_t, int32_t>();
    forms["mul.wide.u32"] = form<MultiplyWide, uint64_t, uint32_t, uint32_t>();
    forms["mad.lo.s32"] = forms["mad.lo.u32"] =
        form<MultiplyAdd, uint32_t, uint32_t, uint32_t, uint32_t>();
    forms["mad.lo.s64"] = forms["mad.lo.u64"] =
        form<MultiplyAdd, uint64_t, uint64_t, uint64_t, uint64_t>();

    each_bits<And>("and.");
    each_bits<Or>("or.");
    each_bits<Xor>("xor.");
    for_bits("not.", form<Not, uint16_t, uint16_t>(), form<Not, uint32_t, uint32_t>(),
             form<Not, uint64_t, uint64_t>());
    forms["not.pred"] = form<NotPredicate, uint8_t, uint8_t>();
    for_bits("shl.", form<ShiftLeft, uint16_t, uint16_t, uint32_t>(),
             form<ShiftLeft, uint32_t, uint32_t, uint32_t>(),
             form<ShiftLeft, uint64_t, uint64_t, uint32_t>());
    shift_right<int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t>();
    forms["popc.b32"] = form<CountOnes, uint32_t, uint32_t>();
    forms["popc.b64"] = form<CountOnes, uint32_t, uint64_t>();
    forms["brev.b32"] = form<Reverse, uint32_t, uint32_t>();
    forms["bfind.shiftamt.u32"] = form<FindShift, uint32_t, uint32_t>();
    forms["bfi.b32"] = form<Insert, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>();
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

    conversions_from<int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t>();
    float_conversions<float>();
    float_conversions<double>();
    convert<Convert<double>, double, float>("cvt.");
    convert<Convert<float>, float, double>("cvt.rn.");

    collective("redux.sync.add.u32", {reduce<Add>, {4}, {4, 4}});
    collective("redux.sync.add.s32", {reduce<Add>, {4}, {4, 4}});
    collective("redux.sync.min.u32", {reduce<Min>, {4}, {4, 4}});
    collective("redux.sync.max.u32", {reduce<Max>, {4}, {4, 4}});
    collective("redux.sync.and.b32", {reduce<And>, {4}, {4, 4}});
    collective("redux.sync.or.b32", {reduce<Or>, {4}, {4, 4}});
    collective("vote.sync.ballot.b32", {ballot, {4}, {1, 4}});
    collective("vote.sync.any.pred", {vote<false>, {1}, {1, 4}});
    collective("vote.sync.all.pred", {vote<true>, {1}, {1, 4}});
    collective("shfl.sync.up.b32", {shuffle<Shuffle::kUp>, {4, 1}, {4, 4, 4, 4}});
    collective("shfl.sync.down.b32", {shuffle<Shuffle::kDown>, {4, 1}, {4, 4, 4, 4}});
    collective("shfl.sync.bfly.b32", {shuffle<Shuffle::kButterfly>, {4, 1}, {4, 4, 4, 4}});
    collective("shfl.sync.idx.b32", {shuffle<Shuffle::kIndex>, {4, 1}, {4, 4, 4, 4}});
    collective("bar.warp.sync", {nothing, {}, {4}});
  }

 private:
  template <typename T>
  static std::string type() {
    const char* letter = is_floating_point_v<T> ? "f" : std::is_signed_v<T> ? "s" : "u";
    return letter + std::to_string(8 * sizeof(T));
  }
  template <typename F, typename... T>
  void one_of_each(const std::string& name) {
    ((forms[name + type<T>()] = form<F, T, T>()), ...);
  }
  template <typename F, typename... T>
  void two_of_each(const std::string& name) {
    ((forms[name + type<T>()] = form<F, T, T, T>()), ...);
  }
  template <typename F>
  void each_integer(const std::string& name) {
    two_of_each<F, int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t>(name);
  }
  template <typename F>
  void each_float(const std::string& name) {
    two_of_each<F, float, double>(name);
  }
  template <typename... T>
  void shift_right() {
    ((forms["shr." + type<T>()] = form<ShiftRight, T, T, uint32_t>()), ...);
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
    compare<F, int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t, float, double>(name);
    compare<Unordered<IfNot>, float, double>(name + "u");
  }
  void comparisons() {
    compare_all<Equal, NotEqual>("eq");
    compare_all<NotEqual, Equal>("ne");
    compare_all<Less, GreaterEqual>("lt");
    compare_all<LessEqual, Greater>("le");
    compare_all<Greater, LessEqual>("gt");
    compare_all<GreaterEqual, Less>("ge");
    compare<Numbers, float, double>("num");
    compare<Unordered<Numbers>, float, double>("nan");
    for (const char* bits : {"16", "32", "64"}) {
      for (const char* name : {"setp.eq.", "setp.ne."}) {
        forms[std::string(name) + "b" + bits] = forms[std::string(name) + "u" + bits];
      }
    }
  }

  template <typename F, typename To, typename From>
  void convert(const std::string& prefix) {
    Form converts = form<F, To, From>();
    converts.run_wide = run_wide<F, To, From>;
    forms[prefix + type<To>() + "." + type<From>()] = converts;
  }
  template <typename To, typename... From>
  void conversions_to() {
    (convert<Convert<To>, To, From>("cvt."), ...);
  }
  template <typename... T>
  void conversions_from() {
    (conversions_to<T, T...>(), ...);
  }
  template <typename Float, typename... Integers>
  void float_and() {
    (convert<Convert<Float>, Float, Integers>("cvt.rn."), ...);
    (convert<Convert<Integers, ToEven>, Integers, Float>("cvt.rni."), ...);
    (convert<Convert<Integers, ToZero>, Integers, Float>("cvt.rzi."), ...);
    (convert<Convert<Integers, Down>, Integers, Float>("cvt.rmi."), ...);
    (convert<Convert<Integers, Up>, Integers, Float>("cvt.rpi."), ...);
  }
  template <typename Float>
  void float_conversions() {
    float_and<Float, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t>();
    convert<Convert<Float, ToEven>, Float, Float>("cvt.rni.");
    convert<Convert<Float, ToZero>, Float, Float>("cvt.rzi.");
    convert<Convert<Float, Down>, Float, Float>("cvt.rmi.");
    convert<Convert<Float, Up>, Float, Float>("cvt.rpi.");
  }

  void collective(const std::string& name, Form form) {
    form.kind = Kind::kCollective;
    forms[name] = form;
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
      {"add.u32", update<uint32_t, Add>}, {"add.s32", update<uint32_t, Add>},
      {"add.u64", update<uint64_t, Add>}, {"or.b32", update<uint32_t, Or>},
      {"and.b32", update<uint32_t, And>}, {"min.u32", update<uint32_t, Min>},
      {"max.u32", update<uint32_t, Max>}, {"max.s32", update<int32_t, Max>},
  };
  const auto found = updates.find(operation);
  return found == updates.end() ? nullptr : found->second;
}

}  // namespace ptx
