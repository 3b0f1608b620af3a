// fiber.h -- a thread of execution that is switched by hand: one CUDA thread.
//
// Sanitizers follow stacks, so each switch is announced to them. The build says which one is on
// (EMULATOR_ASAN, EMULATOR_TSAN), because the emulator itself is compiled without instrumentation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(EMULATOR_TSAN)
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif
#if defined(EMULATOR_ASAN)
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t bytes);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* bytes);
}
#endif

namespace emulator {

// Publishing and observing order for the race checker; nothing without it.
inline void release_order([[maybe_unused]] void* address) {
#if defined(EMULATOR_TSAN)
  __tsan_release(address);
#endif
}
inline void acquire_order([[maybe_unused]] void* address) {
#if defined(EMULATOR_TSAN)
  __tsan_acquire(address);
#endif
}

// While it lives the race checker does not look at this thread: it takes and gives back memory of
// the emulator's own, which belongs to no CUDA thread.
struct Unwatched {
#if defined(EMULATOR_TSAN)
  Unwatched() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unwatched() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Unwatched() {}
#endif
};

#if defined(__x86_64__)
// Saves what the calling convention lets a callee rely on, and swaps stacks: 20 times faster than
// swapcontext, which makes a system call.
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
#endif

class Fiber {
 public:
  static constexpr size_t kStackBytes = 64 << 10;

  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  // The fiber of the OS thread itself; called once, before the others are entered.
  void adopt_thread() {
#if defined(EMULATOR_TSAN)
    tsan_ = __tsan_get_current_fiber();
#endif
  }

  // Makes the next switch to this fiber call `entry`, which must never return. May be called again.
  void prepare(void (*entry)()) {
    if (stack_ == nullptr) {
      stack_ = static_cast<char*>(std::aligned_alloc(64, kStackBytes));
      bottom_ = stack_;
      bytes_ = kStackBytes;
#if defined(EMULATOR_TSAN)
      tsan_ = __tsan_create_fiber(0);
#endif
    }
#if defined(__x86_64__)
    auto** top = reinterpret_cast<void**>(stack_ + kStackBytes - 64);
    *--top = nullptr;  // a call would have left the stack 8 bytes off a multiple of 16
    *--top = reinterpret_cast<void*>(entry);
    top -= 6;  // the registers emulator_switch pops
    std::memset(top, 0, 6 * sizeof(void*));
    context_ = top;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }

  // Leaves `from` for `to`; returns when something switches back to `from`.
  static void switch_to(Fiber& from, Fiber& to) {
#if defined(EMULATOR_TSAN)
    __tsan_switch_to_fiber(to.tsan_, 1);  // 1: the switch itself orders nothing
#endif
#if defined(EMULATOR_ASAN)
    __sanitizer_start_switch_fiber(&from.fake_, to.bottom_, to.bytes_);
#endif
#if defined(__x86_64__)
    emulator_switch(&from.context_, to.context_);
#else
    swapcontext(&from.context_, &to.context_);
#endif
#if defined(EMULATOR_ASAN)
    __sanitizer_finish_switch_fiber(from.fake_, nullptr, nullptr);
#endif
  }

  // First thing a fiber does; `from` is the OS thread's fiber, whose stack is learnt here.
  static void entered([[maybe_unused]] Fiber& from) {
#if defined(EMULATOR_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &from.bottom_, &from.bytes_);
#endif
  }

 private:
#if defined(__x86_64__)
  void* context_ = nullptr;
#else
  ucontext_t context_;
#endif
  char* stack_ = nullptr;
  const void* bottom_ = nullptr;
  size_t bytes_ = 0;
  [[maybe_unused]] void* fake_ = nullptr;  // AddressSanitizer's fake stack
  [[maybe_unused]] void* tsan_ = nullptr;
};

// Fibers that no launch uses: making one is expensive under ThreadSanitizer. Never destroyed.
struct FiberPool {
  std::mutex mutex;
  std::vector<Fiber*> free;

  Fiber* take() {
    std::lock_guard<std::mutex> lock(mutex);
    if (free.empty()) return new Fiber;
    Fiber* fiber = free.back();
    free.pop_back();
    return fiber;
  }
  void give_back(Fiber* fiber) {
    std::lock_guard<std::mutex> lock(mutex);
    free.push_back(fiber);
  }
};

}  // namespace emulator
