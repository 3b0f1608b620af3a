// Feeds ops with bytes that a peer might send: valid inputs and mutations of them.
//
//   fuzz OP SEED FIRST COUNT   inputs FIRST .. FIRST + COUNT - 1, determined by SEED and FIRST
//   fuzz OP HEX                one input, as printed by a run that failed
//
// Kernels compiled with DCT_COVERAGE report the branches that they take, and inputs that take new
// branches are mutated further. No call may access memory outside of its arguments; guards and
// sanitizers detect such accesses. Results must equal the results of the reference decoders.

#include <unistd.h>

#include <csignal>
#include <memory>

#include "fuzz_patches.h"
#include "fuzz_payloads.h"
#include "fuzz_rows.h"

using namespace dct;
using namespace dct::test;

namespace {

#define DCT_PLAIN __attribute__((no_sanitize("address", "undefined")))

// How often each branch was taken, indexed by a hash of the branch's source and target.
constexpr int64_t kBranches = 1 << 14;
uint8_t taken[kBranches];
uint16_t touched[kBranches];
int64_t num_touched = 0, num_taken = 0;
uintptr_t last = 0;
uint8_t known[kBranches];  // bit b: some input took the branch 2^b to 2^(b+1)-1 times

DCT_PLAIN void forget_branches() {
  for (int64_t i = 0; i < num_touched; ++i) taken[touched[i]] = 0;
  num_touched = num_taken = 0;
  last = 0;
}

// Returns whether the branches of the last input set a new bit of `known`.
DCT_PLAIN bool is_new() {
  bool found = false;
  for (int64_t i = 0; i < num_touched; ++i) {
    const uint8_t count = taken[touched[i]];
    const auto bit = static_cast<uint8_t>(1 << (31 - __builtin_clz(count)));
    found = found || (known[touched[i]] & bit) == 0;
    known[touched[i]] |= bit;
  }
  return found;
}

std::string as_hex(const Input& input) {
  char digits[9];
  std::snprintf(digits, sizeof(digits), "%08x", input.setting);
  std::string hex = digits;
  for (uint8_t byte : input.bytes) {
    std::snprintf(digits, sizeof(digits), "%02x", byte);
    hex += digits;
  }
  return hex;
}

Input from_hex(const std::string& hex) {
  Input input;
  input.setting = static_cast<uint32_t>(std::stoul(hex.substr(0, 8), nullptr, 16));
  for (size_t i = 8; i + 1 < hex.size(); i += 2) {
    input.bytes.push_back(static_cast<uint8_t>(std::stoul(hex.substr(i, 2), nullptr, 16)));
  }
  return input;
}

const Input* running = nullptr;  // nullptr between inputs
int64_t running_number = 0;

// Called when a check, a sanitizer, a signal or a timeout ends the process.
void print_input() {
  if (running == nullptr) return;
  std::fprintf(stderr, "input %ld: %s\n", long(running_number), as_hex(*running).c_str());
  running = nullptr;
}

void on_signal(int number) {
  std::fprintf(stderr, "signal %d\n", number);
  print_input();
  _exit(2);
}

struct Found {
  Input input;
  int64_t cost;  // branches taken
};

class Campaign {
 public:
  Campaign(const Target& target, uint64_t seed, int64_t first)
      : target_(target), random_(seed * 0x9E3779B97F4A7C15 + first), number_(first) {}

  void run(int64_t count) {
    for (int64_t i = 0; i < count; ++i, ++number_) {
      if (i % 4096 == 0) alarm(60);
      Input input = i < kSeeds || random_.chance(0.01) ? target_.sound(random_) : mutated();
      sound_ += execute(input) ? 1 : 0;
      if (!is_new() && i >= kSeeds) continue;
      found_.push_back({input, num_taken});
    }
    int64_t branches = 0;
    for (uint8_t magnitudes : known) branches += magnitudes != 0 ? 1 : 0;
    std::printf("{\"inputs\": %ld, \"sound\": %ld, \"max_branches\": %ld, \"kept\": %ld}\n",
                long(count), long(sound_), long(branches), long(found_.size()));
  }

  bool execute(Input& input) {
    running = &input;
    running_number = number_;
    forget_branches();
    const bool sound = target_.run(input, memory_);
    CHECK(memory_.intact(), "a guard was written to");
    running = nullptr;
    return sound;
  }

 private:
  static constexpr int64_t kSeeds = 64;

  Input mutated() {
    Input input = choose();
    const Input other = choose();
    const int64_t few = std::min(random_.integer(0, 4), random_.integer(0, 4));
    for (int64_t changes = 1 << few; changes > 0; --changes) {
      mutate(random_, input, other, [&](Random& random) { return target_.field(random, input); });
    }
    return input;
  }

  // Draws a few inputs, each from the recent ones or from all, and returns the cheapest.
  const Input& choose() {
    const auto all = static_cast<int64_t>(found_.size());
    const auto one = [&]() -> const Found& {
      const int64_t recent = std::min<int64_t>(all, 32);
      return found_[random_.chance(0.5) ? all - random_.integer(1, recent)
                                        : random_.integer(0, all - 1)];
    };
    const Found* best = &one();
    for (int others = random_.chance(0.02) ? 0 : 3; others > 0; --others) {
      const Found& other = one();
      if (other.cost < best->cost) best = &other;
    }
    return best->input;
  }

  const Target& target_;
  Random random_;
  int64_t number_, sound_ = 0;
  Memory memory_;
  std::vector<Found> found_;
};

std::unique_ptr<Target> target_of(const std::string& op) {
  if (op == "scatter_unpack") return std::make_unique<ScatterUnpack>();
  if (op == "dequantize_sum") return std::make_unique<DequantizeSum>();
  if (op == "row_unpack") return std::make_unique<PackedRows>(false);
  if (op == "row_gather") return std::make_unique<PackedRows>(true);
  if (op == "row_dequantize") return std::make_unique<RowDequantize>(false);
  if (op == "row_dequantize_sum") return std::make_unique<RowDequantize>(true);
  if (op == "patch_check") return std::make_unique<Patch>(false);
  if (op == "patch_apply") return std::make_unique<Patch>(true);
  std::fprintf(stderr, "no op %s reads untrusted bytes\n", op.c_str());
  std::exit(2);
}

}  // namespace

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __sanitizer_set_death_callback(void (*callback)());
extern "C" const char* __asan_default_options() {
  return "malloc_context_size=2:quarantine_size_mb=1:thread_local_quarantine_size_kb=64";
}
// UBSan has no death callback, so it aborts with a signal.
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
#endif

extern "C" DCT_PLAIN void __sanitizer_cov_trace_pc() {
  const auto here = reinterpret_cast<uintptr_t>(__builtin_return_address(0)) -
                    reinterpret_cast<uintptr_t>(&num_touched);  // independent of the load address
  const uint64_t mixed = (here ^ last) * 0x9E3779B97F4A7C15;
  const auto branch = static_cast<uint16_t>(mixed >> 50);
  last = here >> 1;
  ++num_taken;
  if (taken[branch] == 0) touched[num_touched++] = branch;
  if (taken[branch] < 255) ++taken[branch];
}

int main(int count, char** arguments) {
  if (count != 3 && count != 5) {
    std::fprintf(stderr, "fuzz OP SEED FIRST COUNT, or fuzz OP HEX\n");
    return 2;
  }
  std::atexit(print_input);
  for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGALRM}) {
    std::signal(number, on_signal);
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(print_input);
#endif
  const auto target = target_of(arguments[1]);
  if (count == 3) {
    Input input = from_hex(arguments[2]);
    Campaign(*target, 0, 0).execute(input);
    return 0;
  }
  const auto number = [&](int index) { return std::strtoll(arguments[index], nullptr, 10); };
  Campaign(*target, number(2), number(3)).run(number(4));
}
