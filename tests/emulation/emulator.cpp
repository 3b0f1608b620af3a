// emulator.cpp -- the scheduler. Compiled without sanitizer instrumentation: fibers of a block
// share its data without the synchronisation a checker would ask for, because only one runs at a
// time.
#include "emulator/emulator.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "emulator/fiber.h"

#if defined(__x86_64__)
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

__thread uint3 threadIdx, blockIdx;
__thread dim3 blockDim, gridDim;

namespace emulator {

Options& options() {
  static Options options;
  return options;
}

Counts& counts() {
  static Counts counts;
  return counts;
}

namespace {

constexpr uint64_t kMaxPauses = 1 << 22;  // of one block, while no block of the launch finishes

enum class State { kReady, kWaiting, kDone };

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
FiberPool& fiber_pool = *new FiberPool;

struct Thread {
  Fiber* const fiber = fiber_pool.take();
  uint3 index;
  State state;
  uint64_t result;  // of its last collective

  ~Thread() { fiber_pool.give_back(fiber); }
};

// Lanes of a warp that wait for each other.
struct Rendezvous {
  bool open = false;
  Collective kind = Collective::kSync;
  uint32_t wanted = 0, arrived = 0;
  uint64_t value[32] = {};
  unsigned source[32] = {};
};

struct Warp {
  uint32_t live = 0;
  Rendezvous rendezvous[32];  // enough, as each lane waits in one
};

struct SharedBlockMemory {
  const void* tag;
  void* data;
};

struct Launch {
  dim3 grid, block;
  size_t dynamic_shared_bytes;
  const std::function<void()>* kernel;
  std::vector<uint64_t> order;
  std::atomic<uint64_t> next{0}, finished{0};
  std::atomic<bool> failed{false};
};

struct Worker {
  Launch& launch;
  std::mt19937 random;
  Fiber scheduler;
  unsigned threads, warps;
  std::unique_ptr<Thread[]> thread;
  std::unique_ptr<Warp[]> warp;
  std::vector<unsigned> order;
  std::vector<SharedBlockMemory> shared;
  void* dynamic_shared = nullptr;
  unsigned current = 0, live = 0, at_barrier = 0;
  uint64_t pauses = 0;

  Worker(Launch& launch, uint32_t seed)
      : launch(launch),
        random(seed),
        threads(launch.block.x * launch.block.y * launch.block.z),
        warps((threads + 31) / 32),
        thread(new Thread[threads]),
        warp(new Warp[warps]),
        order(threads) {
    std::iota(order.begin(), order.end(), 0u);
    scheduler.adopt_thread();
  }

  void run();
  void run_block();
  void lap();
};

__thread Worker* worker = nullptr;

void leave() { Fiber::switch_to(*worker->thread[worker->current].fiber, worker->scheduler); }

// Reports and fails the launch; its other threads are never resumed.
void fail(const char* reason) {
  static std::mutex one_report_at_a_time;
  worker->launch.failed = true;
  std::lock_guard<std::mutex> lock(one_report_at_a_time);
  std::fprintf(stderr, "emulator: %s: block (%u, %u, %u), thread %u; %u of %u live at a barrier\n",
               reason, blockIdx.x, blockIdx.y, blockIdx.z, worker->current, worker->at_barrier,
               worker->live);
  for (unsigned w = 0; w < worker->warps; ++w) {
    for (const Rendezvous& r : worker->warp[w].rendezvous) {
      if (!r.open) continue;
      std::fprintf(stderr, "  warp %u: a collective waits for lanes %08x, has %08x\n", w,
                   r.wanted & worker->warp[w].live, r.arrived);
    }
  }
}

[[noreturn]] void fail_from_thread(const char* reason) {
  fail(reason);
  worker->thread[worker->current].state = State::kWaiting;
  leave();
  std::abort();
}

void complete_barrier_if_full() {
  if (worker->live == 0 || worker->at_barrier < worker->live) return;
  worker->at_barrier = 0;
  for (unsigned t = 0; t < worker->threads; ++t) {
    // All live threads wait at this barrier, none in a collective.
    if (worker->thread[t].state == State::kWaiting) worker->thread[t].state = State::kReady;
  }
}

void complete_if_full(unsigned w, Rendezvous& meeting) {
  const uint32_t arrived = meeting.arrived;
  if (!meeting.open || arrived != (meeting.wanted & worker->warp[w].live)) return;
  meeting.open = false;
  uint64_t sum = 0;
  uint32_t ballot = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(arrived >> lane & 1)) continue;
    sum += meeting.value[lane];
    ballot |= uint32_t{meeting.value[lane] != 0} << lane;
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(arrived >> lane & 1)) continue;
    Thread& thread = worker->thread[w * 32 + lane];
    thread.state = State::kReady;
    const unsigned source = meeting.source[lane];
    switch (meeting.kind) {
      case Collective::kBallot:
        thread.result = ballot;
        break;
      case Collective::kAny:
        thread.result = ballot != 0;
        break;
      case Collective::kAll:
        thread.result = ballot == arrived;
        break;
      case Collective::kReduceAdd:
        thread.result = sum;
        break;
      default:  // a shuffle; from a lane that takes no part nothing comes
        thread.result = meeting.value[arrived >> source & 1 ? source : lane];
    }
  }
}

void thread_main() {
  Fiber::entered(worker->scheduler);
  acquire_order(worker);
  (*worker->launch.kernel)();
  release_order(worker);
  const unsigned w = worker->current / 32;
  worker->thread[worker->current].state = State::kDone;
  worker->live--;
  worker->warp[w].live &= ~(1u << worker->current % 32);
  for (Rendezvous& r : worker->warp[w].rendezvous) complete_if_full(w, r);
  complete_barrier_if_full();
  leave();
  std::abort();
}

void Worker::lap() {
  bool ran = false;
  for (unsigned t : order) {
    if (thread[t].state != State::kReady) continue;
    current = t;
    threadIdx = thread[t].index;
    Fiber::switch_to(scheduler, *thread[t].fiber);
    ran = true;
    if (launch.failed) return;
  }
  if (!ran && live > 0) fail("deadlock, every thread waits");
}

void Worker::run_block() {
  for (unsigned w = 0; w < warps; ++w) warp[w].live = 0;
  for (unsigned t = 0; t < threads; ++t) {
    thread[t].fiber->prepare(thread_main);
    thread[t].index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
    thread[t].state = State::kReady;
    warp[t / 32].live |= 1u << t % 32;
  }
  live = threads;
  at_barrier = 0;
  // Behind a tag like any other, so that AddressSanitizer guards its end.
  static const char dynamic_tag = 0;
  dynamic_shared = shared_memory(&dynamic_tag, launch.dynamic_shared_bytes, 128);
  release_order(this);

  uint64_t finished = launch.finished;
  while (live > 0 && !launch.failed) {
    if (options().seed != 0) std::shuffle(order.begin(), order.end(), random);
    const uint64_t pauses_before = pauses;
    lap();
    if (pauses > pauses_before) sched_yield();
    if (finished != launch.finished) pauses = 0;
    finished = launch.finished;
    if (pauses > kMaxPauses) fail("hang, waiting for another block");
  }
  acquire_order(this);
  for (const SharedBlockMemory& memory : shared) std::free(memory.data);
  shared.clear();
  launch.finished++;
}

void Worker::run() {
  worker = this;
  blockDim = launch.block;
  gridDim = launch.grid;
  for (uint64_t i = launch.next++; i < launch.order.size() && !launch.failed; i = launch.next++) {
    const uint64_t block = launch.order[i];
    blockIdx = {static_cast<unsigned>(block % gridDim.x),
                static_cast<unsigned>(block / gridDim.x % gridDim.y),
                static_cast<unsigned>(block / gridDim.x / gridDim.y)};
    run_block();
  }
}

}  // namespace

bool launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes,
            const std::function<void()>& kernel) {
  counts().kernels++;
  Launch launch{grid, block, dynamic_shared_bytes, &kernel, {}, {}, {}, {}};
  launch.order.resize(uint64_t{grid.x} * grid.y * grid.z);
  std::iota(launch.order.begin(), launch.order.end(), uint64_t{0});
  const uint32_t seed = options().seed;
  if (seed != 0) std::shuffle(launch.order.begin(), launch.order.end(), std::mt19937(seed));
  std::vector<std::thread> workers;
  const auto resident = std::min<uint64_t>(options().resident_blocks, launch.order.size());
  for (uint32_t w = 0; w < resident; ++w) {
    workers.emplace_back([&launch, seed, w] { Worker(launch, seed * 977 + w).run(); });
  }
  for (std::thread& thread : workers) thread.join();
  return !launch.failed;
}

void barrier() {
  void* order = &worker->at_barrier;
  release_order(order);
  worker->at_barrier++;
  worker->thread[worker->current].state = State::kWaiting;
  complete_barrier_if_full();
  leave();
  acquire_order(order);
}

uint64_t collective(uint32_t mask, Collective kind, uint64_t value, unsigned source) {
  const unsigned w = worker->current / 32, lane = worker->current % 32;
  Warp& warp = worker->warp[w];
  if (!(mask >> lane & 1)) fail_from_thread("a lane called a collective that its mask leaves out");
  Rendezvous* meeting = nullptr;
  for (Rendezvous& r : warp.rendezvous) {
    if (r.open && r.wanted == mask) meeting = &r;
  }
  if (meeting == nullptr) {
    meeting = std::find_if(warp.rendezvous, warp.rendezvous + 32, [](auto& r) { return !r.open; });
    meeting->open = true;
    meeting->kind = kind;
    meeting->wanted = mask;
    meeting->arrived = 0;
  }
  if (meeting->kind != kind) fail_from_thread("lanes of a warp met in different collectives");
  if (kind == Collective::kSync) release_order(&warp);
  meeting->value[lane] = value;
  meeting->source[lane] = source;
  meeting->arrived |= 1u << lane;
  worker->thread[worker->current].state = State::kWaiting;
  complete_if_full(w, *meeting);
  leave();
  if (kind == Collective::kSync) acquire_order(&warp);
  return worker->thread[worker->current].result;
}

void schedule_point(uint32_t sleep_odds) {
  if (options().seed == 0) return;
  const uint32_t roll = worker->random() % 64;
  // Asleep, so that other blocks, on threads of their own, surely come in between.
  if (roll < sleep_odds) std::this_thread::sleep_for(std::chrono::microseconds(50));
  if (roll < 16) leave();
}

void pause() {
  worker->pauses++;
  leave();
}

void* shared_memory(const void* tag, size_t bytes, size_t alignment) {
  for (const SharedBlockMemory& memory : worker->shared) {
    if (memory.tag != tag) continue;
    acquire_order(memory.data);
    return memory.data;
  }
  const size_t size = (bytes + alignment - 1) / alignment * alignment;
  void* data = std::aligned_alloc(alignment, std::max(size, alignment));
  std::memset(data, 0xcd, size);
  release_order(data);
  worker->shared.push_back({tag, data});
  return data;
}

void* dynamic_shared_memory() { return worker->dynamic_shared; }

}  // namespace emulator

extern "C" void configure(int64_t seed, int64_t resident_blocks) {
  emulator::options().seed = static_cast<uint32_t>(seed);
  emulator::options().resident_blocks = static_cast<int>(resident_blocks);
}

extern "C" void counted(int64_t* kernels, int64_t* memsets) {
  *kernels = emulator::counts().kernels;
  *memsets = emulator::counts().memsets;
}
