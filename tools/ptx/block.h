// block.h -- a running thread block: its warps, the positions of their lanes in the program, and
// its shared memory.
//
// Lanes of a warp that are at the same instruction execute it together. Diverged lanes run
// separately until they reconverge at an instruction or in a collective. The lanes that are
// furthest behind run first.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "counts.h"
#include "memory.h"
#include "program.h"

namespace ptx {

struct Launch {
  const Program& program;
  uint32_t blocks, threads;  // threads of a block
  int64_t dynamic_shared_bytes;
  std::vector<char> parameters;
  bool in_turn;  // not in random order: each warp runs as far as it can, in lock-step
  Random& random;
  Allocations& memory;
  Races& races;
  Counts& counts;              // used if in_turn
  uint64_t steps = 0;          // since a block last finished
  std::string unwritten = {};  // describes the first load of unwritten bytes
};

constexpr uint64_t kMaxSteps = 1 << 26;  // without a block that finishes

class Block {
 public:
  Block(Launch& launch, uint32_t index);

  uint32_t warps() const { return static_cast<uint32_t>(warps_.size()); }
  bool runnable(uint32_t warp) const { return !warps_[warp].groups.empty(); }
  bool finished() const { return live_ == 0; }
  // Runs some lanes of a runnable warp for one turn.
  void run(uint32_t warp);
  // Describes where threads wait, one line per instruction.
  std::string waiting() const;

 private:
  // Lanes that are at the same instruction.
  struct Group {
    uint32_t lanes;
    int32_t at;
  };
  struct Warp {
    uint32_t number;
    std::vector<char> arena;
    std::vector<Group> groups;
    uint32_t live;  // lanes that have not exited
    uint32_t in_collective = 0, at_barrier = 0;
    int32_t waits_at[kLanes];    // an instruction
    uint32_t waits_for[kLanes];  // the mask, for lanes in a collective
  };

  Group furthest_behind(Warp& warp);
  void branch(Warp& warp, Group& group, const Instruction& i, uint32_t lanes);
  bool collect(Warp& warp, const Group& group, const Instruction& i);
  void meet(Warp& warp, const Instruction& i, uint32_t lanes);
  void complete_collectives(Warp& warp);
  void complete_barrier();
  void leave(Warp& warp, uint32_t lanes);
  void access(Warp& warp, const Instruction& i, uint32_t lanes);
  // Returns the accessed address.
  uint64_t access(const Warp& warp, const Instruction& i, int lane, char* registers);
  // Host memory, and a flag per byte that is set if the byte was written (null if all bytes were).
  struct Place {
    char *memory, *written;
  };
  Place locate(const Warp& warp, const Instruction& i, int lane, int64_t address, int bytes);
  // Records loads of unwritten bytes, and marks the bytes that a store writes as written.
  void track(const Warp& warp, const Instruction& i, int lane, int64_t address, const Place& place,
             int bytes);
  // Fails if the access is a race.
  void order(const Warp& warp, const Instruction& i, int lane, int64_t address, char* memory,
             int bytes);
  [[noreturn]] void fail(const Warp& warp, int lane, const Instruction& i,
                         const std::string& what) const;
  std::string described(const Warp& warp, int lane, const Instruction& i,
                        const std::string& what) const;
  std::string place(const Instruction& i) const;

  Launch& launch_;
  const Program& program_;
  const uint32_t index_;
  Clock clock_;
  std::vector<Extent> shared_extents_;
  std::unique_ptr<char, void (*)(void*)> shared_;
  std::vector<char> shared_written_;
  std::vector<Warp> warps_;
  uint32_t live_;
};

}  // namespace ptx
