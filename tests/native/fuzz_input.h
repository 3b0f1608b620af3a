#pragma once

// Inputs of the fuzzer, their mutation, and the memory of an op's arguments.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "support.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, nbytes)
#define ASAN_UNPOISON_MEMORY_REGION(begin, nbytes)
#endif

namespace dct::test {

// The untrusted bytes, and a setting that selects sizes and formats. The bytes are truncated or
// padded with zeros to the length that the call needs.
struct Input {
  uint32_t setting = 0;
  std::vector<uint8_t> bytes;
};

// Decodes a setting as a mixed-radix number with one digit per pick.
class Setting {
 public:
  explicit Setting(uint32_t setting) : rest_(setting) {}

  template <typename T>
  T pick(std::initializer_list<T> from) {
    const T picked = from.begin()[rest_ % from.size()];
    rest_ /= static_cast<uint32_t>(from.size());
    return picked;
  }

 private:
  uint32_t rest_;
};

// The offset and size of a number in an input's bytes.
struct Field {
  int64_t offset;
  int bytes;
};

// Memory between guards. ASan reports accesses to guards, and intact() checks the guards' bytes.
class Memory {
 public:
  ~Memory() { ASAN_UNPOISON_MEMORY_REGION(arena_, sizeof(arena_)); }

  // Allocates n elements, `offset` bytes past a 64-byte boundary.
  template <typename T>
  T* take(int64_t n, int64_t offset = 0) {
    const int64_t begin = (used_ + kGuard + 63) / 64 * 64 + offset;
    const int64_t end = begin + n * static_cast<int64_t>(sizeof(T));
    CHECK(end + kGuard <= kBytes, "the arena is too small");
    guard(used_, begin);
    guard(end, end + kGuard);
    used_ = end;
    return reinterpret_cast<T*>(arena_ + begin);
  }

  // Releases all memory, and returns whether all guards are unchanged.
  bool intact() {
    ASAN_UNPOISON_MEMORY_REGION(arena_, used_ + kGuard);
    bool same = true;
    for (const auto& [begin, end] : guards_) {
      for (int64_t i = begin; i < end; ++i) same = same && arena_[i] == kPattern;
    }
    guards_.clear();
    used_ = 0;
    return same;
  }

 private:
  void guard(int64_t begin, int64_t end) {
    ASAN_UNPOISON_MEMORY_REGION(arena_ + begin, end - begin);
    std::memset(arena_ + begin, kPattern, end - begin);
    ASAN_POISON_MEMORY_REGION(arena_ + begin, end - begin);
    guards_.push_back({begin, end});
  }

  static constexpr int64_t kBytes = 1 << 20, kGuard = 64;
  static constexpr uint8_t kPattern = 0xC5;
  alignas(64) uint8_t arena_[kBytes];
  int64_t used_ = 0;
  std::vector<std::pair<int64_t, int64_t>> guards_;
};

// Returns a number at or next to a limit that a reader may check incorrectly.
inline uint64_t boundary(Random& random) {
  const uint64_t near = random.pick<uint64_t>(
      {0, 1, 2, 64, 255, 1024, 16384, 65535, 1u << 31, 1ull << 32, 1ull << 63, ~0ull});
  return near + random.integer(-1, 1);
}

// Mutates an input slightly. `field` returns a random numeric field of the input.
template <typename FieldOf>
void mutate(Random& random, Input& input, const Input& other, const FieldOf& field) {
  std::vector<uint8_t>& bytes = input.bytes;
  const auto size = static_cast<int64_t>(bytes.size());
  const auto at = [&] { return random.integer(0, size - 1); };
  if (size == 0) {
    input = other;
    return;
  }
  switch (random.integer(0, 9)) {
    case 0:
      bytes[at()] ^= 1 << random.integer(0, 7);
      break;
    case 1:
      bytes[at()] = static_cast<uint8_t>(random.integer(0, 255));
      break;
    case 2: {  // truncate
      const int64_t begin = at();
      std::fill(bytes.begin() + begin, bytes.end(), uint8_t{0});
      break;
    }
    case 3: {  // copy a piece of the other input
      if (other.bytes.empty()) break;
      const auto length = static_cast<int64_t>(other.bytes.size());
      const int64_t from = random.integer(0, length - 1);
      const int64_t to = random.chance(0.7) ? std::min(from, size - 1) : at();
      const int64_t n = random.integer(1, std::min(length - from, size - to));
      std::copy_n(other.bytes.begin() + from, n, bytes.begin() + to);
      break;
    }
    case 4:  // use the bytes with another setting
      input.setting = random.chance(0.5) ? other.setting : static_cast<uint32_t>(boundary(random));
      break;
    case 5: {  // repeat a piece
      const int64_t from = at(), to = at();
      const int64_t n = random.integer(1, std::min<int64_t>(16, size - std::max(from, to)));
      std::copy_n(std::vector<uint8_t>(bytes.begin() + from, bytes.begin() + from + n).begin(), n,
                  bytes.begin() + to);
      break;
    }
    default: {
      const Field to = field(random), from = field(random);
      if (to.offset + to.bytes > size || from.offset + from.bytes > size) break;
      uint64_t number = 0;
      std::memcpy(&number, bytes.data() + to.offset, to.bytes);
      switch (random.integer(0, 3)) {
        case 0:
          number += random.integer(-2, 2);
          break;
        case 1:
          number = boundary(random);
          break;
        case 2:
          number ^= uint64_t{1} << random.integer(0, 8 * to.bytes - 1);
          break;
        default:
          number = 0;
          std::memcpy(&number, bytes.data() + from.offset, from.bytes);
          number += random.integer(-1, 1);
      }
      std::memcpy(bytes.data() + to.offset, &number, to.bytes);
    }
  }
}

// Values of the trusted arguments, including special values. They are the same in every run.
inline const std::vector<float>& floats() {
  static const std::vector<float> pool = Random(1).reals<float>(1 << 14);
  return pool;
}

// Calls function(parallel). `parallel` runs tasks sequentially, or on threads in TSan builds.
template <typename Function>
void with_tasks(int64_t tasks, Function&& function) {
#if defined(__SANITIZE_THREAD__)
  return with_threads(tasks, function);
#endif
  const auto in_turn = [](int64_t count, cpu::FunctionRef<void(int64_t)> body) {
    for (int64_t task = count - 1; task >= 0; --task) body(task);
  };
  function(cpu::Parallel{tasks, in_turn});
}

// An op that reads untrusted bytes.
struct Target {
  virtual ~Target() = default;
  // An input that a correct peer might send.
  virtual Input sound(Random& random) const = 0;
  // Calls the op and checks its results. Returns whether the op accepted the input as valid.
  virtual bool run(Input& input, Memory& memory) const = 0;
  virtual Field field(Random& random, const Input& input) const = 0;
};

}  // namespace dct::test
