// emulator.h -- what the emulated CUDA headers need from the scheduler in emulator.cpp.
//
// One fiber per CUDA thread of the resident blocks, one of which runs at a time: until it meets a
// barrier, a warp collective or a schedule point. Which fiber runs next and in which order blocks
// start follows from a seed. A deadlock or a misused collective fails the launch with a report on
// stderr.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Of the CUDA thread that runs. __thread, not thread_local: a plain load, without a check for its
// initialisation.
extern __thread uint3 threadIdx, blockIdx;
extern __thread dim3 blockDim, gridDim;

namespace emulator {

struct Options {
  int resident_blocks = 3;  // blocks that run at the same time
  uint32_t seed = 0;        // 0: blocks and threads in order; else shuffled by it
};
Options& options();

// What was asked of the GPU so far.
struct Counts {
  std::atomic<int64_t> kernels{0}, memsets{0};
};
Counts& counts();

// Runs `kernel` once for every thread of the grid. False if the launch failed.
bool launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes,
            const std::function<void()>& kernel);

// Where a kernel's source calls what waits for others: they have to be there too.
struct Place {
  const char* file;
  int line;

  static Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
  bool operator==(const Place& other) const {
    return line == other.line && std::strcmp(file, other.file) == 0;
  }
  std::string text() const { return std::string(file) + ":" + std::to_string(line); }
};

void barrier(Place place);

// What the lanes of a warp do together. Only kSync orders memory: shuffles and votes do not on a
// GPU.
enum class Collective { kSync, kShuffle, kShuffleUp, kShuffleXor, kBallot, kAny, kReduceAdd };

// Waits for all lanes in `mask`, of which this must be one, to call the same collective. A shuffle
// returns the value of the lane `source`.
uint64_t collective(uint32_t mask, Collective kind, Place place, uint64_t value,
                    unsigned source = 0);

// Lets other threads run, of this block and of others, as a GPU may at any instruction that others
// can observe. Does nothing without a seed.
void schedule_point();

// Memory of the block under `tag`, the same for all its threads, filled with 0xcd at first.
void* shared_memory(const void* tag, size_t bytes, size_t alignment);
void* dynamic_shared_memory();

}  // namespace emulator
