// counts.h -- counts the cost of a kernel whose warps run in lock-step: how often each instruction
// is issued, and which memory it accesses.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "program.h"

namespace ptx {

// The addresses that the lanes of a warp access with one instruction.
struct Touched {
  std::array<uint64_t, kLanes> begin;
  int lanes = 0;
  void add(uint64_t address) { begin[lanes++] = address; }
};

// Counts sectors of device memory that were read before they were written, and written sectors.
// These counts are the memory traffic with an infinitely large cache.
class Footprint {
 public:
  void read(uint64_t address) { touch(address, kRead); }
  void write(uint64_t address) { touch(address, kWritten); }
  void write(uint64_t begin, int64_t bytes);

  uint64_t sectors_read = 0, sectors_written = 0;
  static constexpr int kSector = 32;

 private:
  enum State : uint8_t { kRead = 1, kWritten = 2 };
  static constexpr int kSectors = 128;  // per page
  void touch(uint64_t address, State now);
  std::unordered_map<uint64_t, std::array<uint8_t, kSectors>> pages_;
};

// The counts of a kernel over all its launches.
class Counts {
 public:
  Counts(const Program& program, Footprint& footprint)
      : program_(program), footprint_(footprint), counts_(program.code.size()) {}

  // Counts an instruction that a warp issues for `lanes` (0 if the guard is false for all).
  void issue(const Instruction& i, uint32_t lanes) {
    Count& count = count_of(i);
    ++count.issues;
    count.lanes += __builtin_popcount(lanes);
  }
  void access(const Instruction& i, const Touched& touched);

  // Returns a line for the kernel, and a line for each of its instructions.
  std::string report() const;

 private:
  struct Count {
    uint64_t issues = 0, lanes = 0;
    uint64_t sectors = 0;  // distinct sectors of device memory per issue, summed over issues
  };
  Count& count_of(const Instruction& i) { return counts_[&i - program_.code.data()]; }

  const Program& program_;
  Footprint& footprint_;
  std::vector<Count> counts_;
};

}  // namespace ptx
