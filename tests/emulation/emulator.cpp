// emulator.cpp -- the scheduler. Frozen: tests/ptx comes first (docs/design/verification.md).
// Compiled without sanitizer instrumentation: fibers share its data without the synchronisation a
// checker would ask for, because only one runs at a time.
#include "emulator/emulator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "emulator/fiber.h"

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

constexpr uint32_t kMostSteps = 8;  // of a block until another's turn, as a power of 2

enum class State { kReady, kWaiting, kDone };

FiberPool& fiber_pool = *new FiberPool;

struct Thread {
  Fiber* const fiber = fiber_pool.take();
  uint3 index;
  State state = State::kReady;
  uint64_t result = 0;  // of its last collective

  ~Thread() { fiber_pool.give_back(fiber); }
};

// What a race checker is told about a meeting. Who comes to the next one may release before all
// have left this one: the two are told apart.
struct Order {
  char of[2] = {};
  unsigned meetings = 0;
  void* now() { return &of[meetings % 2]; }
};

// Lanes of a warp that wait for each other.
struct Rendezvous {
  bool open = false;
  Collective kind = Collective::kSync;
  Place place = {};
  uint32_t wanted = 0, arrived = 0;
  Order order = {};
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

struct Block {
  const uint32_t number;
  const uint3 index;
  std::unique_ptr<Thread[]> thread;
  std::vector<Warp> warp;
  std::vector<unsigned> order;  // of threads, in this lap
  unsigned next = 0;            // in that order
  bool ran = true;              // a thread, in this lap
  std::vector<SharedBlockMemory> shared;
  void* dynamic_shared = nullptr;
  unsigned current = 0, live, at_barrier = 0;
  Place barrier = {};
  Order barrier_order = {};

  Block(uint32_t number, unsigned threads);
  ~Block();
  unsigned threads() const { return static_cast<unsigned>(order.size()); }
};

struct Launch {
  dim3 grid, block;
  size_t dynamic_shared_bytes;
  const std::function<void()>* kernel;
  std::mt19937 random;
  Fiber scheduler = {};
  bool failed = false, turn_ends = false;

  bool in_turn() const { return options().seed == 0; }
  void run();
  void turn(Block& block);
};

__thread Launch* running = nullptr;
__thread Block* active = nullptr;  // whose turn it is

void leave() { Fiber::switch_to(*active->thread[active->current].fiber, running->scheduler); }

// Reports and fails the launch; its threads are never resumed.
void fail(const std::string& reason) {
  running->failed = true;
  std::fprintf(stderr, "emulator: %s: block (%u, %u, %u), thread %u; %u of %u live at a barrier\n",
               reason.c_str(), active->index.x, active->index.y, active->index.z, active->current,
               active->at_barrier, active->live);
  for (size_t w = 0; w < active->warp.size(); ++w) {
    for (const Rendezvous& r : active->warp[w].rendezvous) {
      if (!r.open) continue;
      std::fprintf(stderr, "  warp %zu: %s waits for lanes %08x, has %08x\n", w,
                   r.place.text().c_str(), r.wanted & active->warp[w].live, r.arrived);
    }
  }
}

[[noreturn]] void fail_from_thread(const std::string& reason) {
  fail(reason);
  active->thread[active->current].state = State::kWaiting;
  leave();
  std::abort();
}

void require_same(Place here, Place there, const char* what) {
  if (here == there) return;
  fail_from_thread(std::string(what) + ", " + here.text() + " against " + there.text());
}

void complete_barrier_if_full() {
  if (active->live == 0 || active->at_barrier < active->live) return;
  active->at_barrier = 0;
  active->barrier_order.meetings++;
  for (unsigned t = 0; t < active->threads(); ++t) {
    // All live threads wait at this barrier, none in a collective.
    if (active->thread[t].state == State::kWaiting) active->thread[t].state = State::kReady;
  }
}

void complete_if_full(unsigned w, Rendezvous& meeting) {
  const uint32_t arrived = meeting.arrived;
  if (!meeting.open || arrived != (meeting.wanted & active->warp[w].live)) return;
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
    Thread& thread = active->thread[w * 32 + lane];
    thread.state = State::kReady;
    const unsigned source = meeting.source[lane];
    switch (meeting.kind) {
      case Collective::kBallot:
        thread.result = ballot;
        break;
      case Collective::kAny:
        thread.result = ballot != 0;
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
  Fiber::entered(running->scheduler);
  acquire_order(&running->kernel);
  (*running->kernel)();
  release_order(&running->failed);
  const unsigned w = active->current / 32;
  active->thread[active->current].state = State::kDone;
  active->live--;
  active->warp[w].live &= ~(1u << active->current % 32);
  for (Rendezvous& r : active->warp[w].rendezvous) complete_if_full(w, r);
  complete_barrier_if_full();
  leave();
  std::abort();
}

Block::Block(uint32_t number, unsigned threads)
    : number(number),
      index{number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y},
      thread(new Thread[threads]),
      warp((threads + 31) / 32),
      order(threads),
      live(threads) {
  std::iota(order.begin(), order.end(), 0u);
  for (unsigned t = 0; t < threads; ++t) {
    thread[t].fiber->prepare(thread_main);
    thread[t].index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
    warp[t / 32].live |= 1u << t % 32;
  }
}

Block::~Block() {
  const Unwatched scope;
  for (const SharedBlockMemory& memory : shared) std::free(memory.data);
}

// Some of a block's threads, each to where it waits or others may come in between. In a lap every
// thread that is ready comes once.
void Launch::turn(Block& its) {
  active = &its;
  blockIdx = its.index;
  turn_ends = false;
  uint32_t steps = its.threads();
  if (!in_turn()) {
    const uint32_t most = 1u << random() % (kMostSteps + 1);
    steps = 1 + random() % most;
  }
  while (steps > 0 && its.live > 0 && !failed && !turn_ends) {
    if (its.next == its.threads()) its.next = 0;
    if (its.next == 0) {
      if (!its.ran) return fail("deadlock, every thread waits");
      its.ran = false;
      if (!in_turn()) std::shuffle(its.order.begin(), its.order.end(), random);
    }
    its.current = its.order[its.next++];
    Thread& thread = its.thread[its.current];
    if (thread.state != State::kReady) continue;
    threadIdx = thread.index;
    Fiber::switch_to(scheduler, *thread.fiber);
    its.ran = true;
    --steps;
  }
}

void Launch::run() {
  scheduler.adopt_thread();
  release_order(&kernel);  // what was written before the launch, to all its threads
  std::vector<uint32_t> order(uint64_t{grid.x} * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0u);
  if (!in_turn()) std::shuffle(order.begin(), order.end(), random);
  std::vector<std::unique_ptr<Block>> resident;
  size_t next = 0, turn_of = 0;
  while (!failed) {
    while (next < order.size() && resident.size() < size_t(options().resident_blocks)) {
      resident.push_back(std::make_unique<Block>(order[next++], block.x * block.y * block.z));
      active = resident.back().get();
      // Behind a tag like any other, so that AddressSanitizer guards its end.
      static const char dynamic_tag = 0;
      active->dynamic_shared = shared_memory(&dynamic_tag, dynamic_shared_bytes, 128);
    }
    if (resident.empty()) return;
    turn_of = in_turn() ? (turn_of + 1) % resident.size() : random() % resident.size();
    turn(*resident[turn_of]);
    if (resident[turn_of]->live == 0) resident.erase(resident.begin() + turn_of);
  }
}

}  // namespace

bool launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes,
            const std::function<void()>& kernel) {
  counts().kernels++;
  Launch launch = {grid, block, dynamic_shared_bytes, &kernel, std::mt19937(options().seed)};
  running = &launch;
  blockDim = block;
  gridDim = grid;
  launch.run();
  acquire_order(&launch.failed);  // what the threads have written
  return !launch.failed;
}

void barrier(Place place) {
  if (active->at_barrier == 0) active->barrier = place;
  require_same(place, active->barrier, "threads of a block met at different barriers");
  void* const order = active->barrier_order.now();
  release_order(order);
  active->at_barrier++;
  active->thread[active->current].state = State::kWaiting;
  complete_barrier_if_full();
  leave();
  acquire_order(order);
}

uint64_t collective(uint32_t mask, Collective kind, Place place, uint64_t value, unsigned source) {
  const unsigned w = active->current / 32, lane = active->current % 32;
  Warp& warp = active->warp[w];
  if (!(mask >> lane & 1)) fail_from_thread("a lane called a collective that its mask leaves out");
  Rendezvous* meeting = nullptr;
  for (Rendezvous& r : warp.rendezvous) {
    if (r.open && r.wanted == mask) meeting = &r;
  }
  if (meeting == nullptr) {
    meeting = std::find_if(warp.rendezvous, warp.rendezvous + 32, [](auto& r) { return !r.open; });
    meeting->open = true;
    meeting->kind = kind;
    meeting->place = place;
    meeting->wanted = mask;
    meeting->arrived = 0;
    meeting->order.meetings++;
  }
  require_same(place, meeting->place, "lanes of a warp met in different collectives");
  void* const order = meeting->order.now();
  if (kind == Collective::kSync) release_order(order);
  meeting->value[lane] = value;
  meeting->source[lane] = source;
  meeting->arrived |= 1u << lane;
  active->thread[active->current].state = State::kWaiting;
  complete_if_full(w, *meeting);
  leave();
  if (kind == Collective::kSync) acquire_order(order);
  return active->thread[active->current].result;
}

void schedule_point() {
  if (running->in_turn()) return;
  const uint32_t roll = running->random() % 64;
  running->turn_ends = roll < 4;
  if (roll < 16) leave();
}

void* shared_memory(const void* tag, size_t bytes, size_t alignment) {
  for (const SharedBlockMemory& memory : active->shared) {
    if (memory.tag == tag) return memory.data;
  }
  const Unwatched scope;
  const size_t size = (bytes + alignment - 1) / alignment * alignment;
  void* data = std::aligned_alloc(alignment, std::max(size, alignment));
  std::memset(data, 0xcd, size);
  active->shared.push_back({tag, data});
  return data;
}

void* dynamic_shared_memory() { return active->dynamic_shared; }

}  // namespace emulator

extern "C" void configure(int64_t seed, int64_t resident_blocks) {
  emulator::options().seed = static_cast<uint32_t>(seed);
  emulator::options().resident_blocks = static_cast<int>(resident_blocks);
}

extern "C" void counted(int64_t* kernels, int64_t* memsets) {
  *kernels = emulator::counts().kernels;
  *memsets = emulator::counts().memsets;
}
