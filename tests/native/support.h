#pragma once

// Code for all native tests: a check that stops the program, threads, random inputs, exact
// rounding.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

#include "../../csrc/common/floats.h"
#include "../../csrc/cpu/parallel.h"

// Exits with a message if the condition is false. `...` is a printf format and its arguments.
#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                   \
      std::fprintf(stderr, "\n");                                          \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

namespace dct::test {

template <typename T>
constexpr DType kDType = std::is_same_v<T, Float16>    ? DType::kFloat16
                         : std::is_same_v<T, BFloat16> ? DType::kBFloat16
                                                       : DType::kFloat32;

// Runs tasks on new threads. A free thread takes the next task, so the order of tasks varies.
struct Threads {
  int64_t threads;

  void operator()(int64_t tasks, cpu::FunctionRef<void(int64_t)> body) const {
    std::atomic<int64_t> next{0};
    auto work = [&] {
      for (int64_t task = next++; task < tasks; task = next++) body(task);
    };
    std::vector<std::thread> pool;
    for (int64_t t = 0; t < threads; ++t) pool.emplace_back(work);
    for (std::thread& thread : pool) thread.join();
  }
};

// Calls function(parallel), which runs tasks on `threads` threads.
template <typename Function>
void with_threads(int64_t threads, Function&& function) {
  const Threads run{threads};
  function(cpu::Parallel{threads, run});
}

inline uint32_t bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float from_bits(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline uint32_t bits(BFloat16 x) { return x.bits; }
inline uint32_t bits(Float16 x) { return x.bits; }

// A format with the layout of IEEE 754 and `kMantissa` stored mantissa bits.
template <typename T>
struct Format;
template <>
struct Format<float> {
  static constexpr int kBits = 32, kMantissa = 23, kBias = 127;
};
template <>
struct Format<BFloat16> {
  static constexpr int kBits = 16, kMantissa = 7, kBias = 127;
};
template <>
struct Format<Float16> {
  static constexpr int kBits = 16, kMantissa = 10, kBias = 15;
};

// The value of a bit pattern, by the definition of the format.
template <typename T>
double decode(uint32_t u) {
  using F = Format<T>;
  const int exponent_bits = F::kBits - 1 - F::kMantissa;
  const uint32_t mantissa = u & ((1u << F::kMantissa) - 1);
  const int exponent = static_cast<int>(u >> F::kMantissa) & ((1 << exponent_bits) - 1);
  const double sign = u >> (F::kBits - 1) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  }
  const double significand = exponent == 0 ? mantissa : mantissa + (1 << F::kMantissa);
  return sign * std::ldexp(significand, std::max(exponent, 1) - F::kBias - F::kMantissa);
}

// The bit pattern nearest to x, ties to even, by the definition of the format. NaN becomes quiet.
template <typename T>
uint32_t encode(double x, bool saturate = false) {
  using F = Format<T>;
  const uint32_t sign = std::signbit(x) ? 1u << (F::kBits - 1) : 0;
  const uint32_t infinity = ((1u << (F::kBits - 1 - F::kMantissa)) - 1) << F::kMantissa;
  if (std::isnan(x)) return infinity | (1u << (F::kMantissa - 1));
  if (std::isinf(x)) return sign | infinity;
  if (x == 0) return sign;
  const int exponent = std::max(std::ilogb(x), 1 - F::kBias);
  // The bit pattern is the number of units in the last place plus an offset for the exponent.
  const double units = std::nearbyint(std::ldexp(std::fabs(x), F::kMantissa - exponent));
  const double pattern = units + std::ldexp(exponent - 1 + F::kBias, F::kMantissa);
  if (pattern >= infinity) return sign | (saturate ? infinity - 1 : infinity);
  return sign | static_cast<uint32_t>(pattern);
}

template <typename T>
double value(T x) {
  return decode<T>(bits(x));
}

template <typename T>
void check_bits(const char* what, const T* actual, const T* expected, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    CHECK(bits(actual[i]) == bits(expected[i]), "%s[%ld]: expected %a, got %a", what, long(i),
          value(expected[i]), value(actual[i]));
  }
}

// Converts x to T with one rounding.
template <typename T>
T make(double x) {
  const uint32_t u = encode<T>(x);
  T result;
  std::memcpy(&result, &u, sizeof(result));
  return result;
}

// float32 arithmetic in double: a product is exact, and rounding a sum twice does not change it.
inline float multiply(float a, float b) {
  return from_bits(encode<float>(static_cast<double>(a) * b));
}
inline float add(float a, float b) { return from_bits(encode<float>(static_cast<double>(a) + b)); }

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  // A random number in [low, high].
  int64_t integer(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(engine_) < p; }

  template <typename T>
  T pick(std::initializer_list<T> from) {
    return from.begin()[integer(0, static_cast<int64_t>(from.size()) - 1)];
  }

  // Mostly normally distributed numbers, mixed with special values and random bits.
  float real() {
    if (chance(0.9)) return std::normal_distribution<float>(0, 1)(engine_);
    if (chance(0.5)) return from_bits(static_cast<uint32_t>(engine_()));
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    return pick({0.0f, -0.0f, 1.0f, -1.0f, 1e-45f, -1e-40f, 3.4e38f, -3.39e38f, kInfinity,
                 -kInfinity, std::numeric_limits<float>::quiet_NaN()});
  }

  template <typename T>
  std::vector<T> reals(int64_t n) {
    std::vector<T> result(n);
    for (T& x : result) x = make<T>(real());
    return result;
  }

 private:
  std::mt19937_64 engine_;
};

// Bytes at a 16-byte boundary, as payloads require.
class AlignedBytes {
 public:
  AlignedBytes(int64_t size, uint8_t fill) : size_(size), words_((size + 15) / 16, Word(fill)) {}
  uint8_t* data() { return reinterpret_cast<uint8_t*>(words_.data()); }
  int64_t size() const { return size_; }

 private:
  struct alignas(16) Word {
    explicit Word(uint8_t fill) { std::memset(bytes, fill, sizeof(bytes)); }
    uint8_t bytes[16];
  };
  int64_t size_;
  std::vector<Word> words_;
};

}  // namespace dct::test
