#pragma once

// Function multiversioning: a loop is compiled for several instruction sets, and one of the
// versions is selected at run time.
//
// vectorize([&] { for (...) ... }) calls its argument. On x86-64 the code is inlined into three
// functions that differ in their target attribute, and the compiler vectorizes each. On other
// architectures the argument is called directly. The compiler vectorizes loops whose iterations all
// do the same work on arrays: no early exit, only inlined calls, selects instead of branches.

#include <cstdlib>
#include <cstring>

namespace dct::cpu {

#if defined(__x86_64__) && defined(__GNUC__)

enum class Isa { kBaseline, kAvx2, kAvx512 };

// The best instruction set of the processor, or a lower one set in torch's ATEN_CPU_CAPABILITY.
inline Isa isa() {
  static const Isa best = [] {
    const char* wanted = std::getenv("ATEN_CPU_CAPABILITY");
    const bool avx512 = wanted == nullptr || std::strcmp(wanted, "avx512") == 0;
    const bool avx2 = avx512 || std::strcmp(wanted, "avx2") == 0;
    if (avx512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return Isa::kAvx512;
    }
    return avx2 && __builtin_cpu_supports("avx2") ? Isa::kAvx2 : Isa::kBaseline;
  }();
  return best;
}

// flatten inlines the loop, and everything that it calls, into a function with this target.
template <typename Loop>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), flatten, noinline)) void run_avx512(
    const Loop& loop) {
  loop();
}

template <typename Loop>
__attribute__((target("avx2"), flatten, noinline)) void run_avx2(const Loop& loop) {
  loop();
}

template <typename Loop>
void vectorize(const Loop& loop) {
  switch (isa()) {
    case Isa::kAvx512:
      return run_avx512(loop);
    case Isa::kAvx2:
      return run_avx2(loop);
    default:
      return loop();
  }
}

// As vectorize, for a loop that takes a class of intrinsics, one per instruction set.
template <typename Plain, typename Avx2, typename Avx512, typename Loop>
void vectorize_by(const Loop& loop) {
  switch (isa()) {
    case Isa::kAvx512:
      return run_avx512([&] { loop(Avx512{}); });
    case Isa::kAvx2:
      return run_avx2([&] { loop(Avx2{}); });
    default:
      return loop(Plain{});
  }
}

#else

template <typename Loop>
void vectorize(const Loop& loop) {
  loop();
}

template <typename Plain, typename Avx2, typename Avx512, typename Loop>
void vectorize_by(const Loop& loop) {
  loop(Plain{});
}

#endif

}  // namespace dct::cpu
