// memory.h -- tracks allocations and written bytes of device memory, and the order of accesses to
// device and shared memory.
//
// Two accesses to the same bytes are a race if at least one writes, at least one is not atomic, and
// they are not ordered. Accesses are ordered by program order in a thread, by bar.warp.sync or
// bar.sync, or by a release and an acquire. A race is always an error, even if it has no effect in
// this run, because PTX does not define the behavior of programs with races.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "program.h"

namespace ptx {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15 + 1) {}
  uint32_t operator()() {  // xorshift64*
    state_ ^= state_ >> 12, state_ ^= state_ << 25, state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1d >> 32;
  }
  uint32_t below(uint32_t n) { return uint64_t{(*this)()} * n >> 32; }

 private:
  uint64_t state_;
};

struct Allocation {
  uint64_t begin, end;
  std::vector<char> written;  // a flag per byte; empty if the host wrote all bytes
  bool contains(uint64_t address, int64_t bytes) const {
    return begin <= address && address + bytes <= end;
  }
  // The flags, starting at this byte; null if all bytes are written.
  char* written_at(uint64_t address) {
    return written.empty() ? nullptr : &written[address - begin];
  }
};

// Device memory. Addresses are host addresses.
class Allocations {
 public:
  void add(uint64_t begin, int64_t bytes, bool written);
  void remove(uint64_t begin) { all_.erase(begin), last_ = nullptr; }
  // The allocation that contains all of these bytes, or null.
  Allocation* find(uint64_t begin, int64_t bytes);
  std::string nearest(uint64_t address) const;

 private:
  std::map<uint64_t, Allocation> all_;  // by `begin`
  Allocation* last_ = nullptr;
};

// The clock of a block. Records which accesses happened before the current position of each thread.
class Clock {
 public:
  // The view that a release publishes: {block: the epoch before which all accesses are known}. This
  // is enough, because kernels release only accesses that the block made before a barrier.
  using View = std::unordered_map<uint32_t, uint32_t>;

  Clock(uint32_t block, uint32_t threads);

  void barrier();
  void warp_barrier(uint32_t warp, uint32_t lanes);
  void acquire(uint32_t thread, const View& view) { acquired_.push_back({thread, view}); }
  void release(uint32_t thread, View& into);

  const uint32_t block;  // unique over all launches
  uint32_t epoch = 1;    // barriers passed
  struct Thread {
    uint32_t now = 1;
    std::array<uint32_t, kLanes> known = {};  // clocks of the lanes of its warp
  };
  std::vector<Thread> threads;

  // Whether an access of block `other` happened before the current position of `thread`.
  bool after(uint32_t thread, uint32_t other, uint32_t other_thread, uint32_t other_epoch,
             uint32_t other_now) const;

 private:
  static void join(View& into, const View& from);
  View view_;
  std::vector<std::pair<uint32_t, View>> acquired_;  // (thread, view), since a barrier
};

class Races {
 public:
  explicit Races(Random& random) : random_(random) {}

  void begin_launch() { first_block_ = next_block_, views_.clear(); }
  uint32_t new_block() { return next_block_++; }
  // Forget the accesses in [begin, end), which are multiples of kPage.
  void forget(uint64_t begin, uint64_t end);

  // Record an access. Return a description of a conflict, or nullptr.
  const char* read(const Clock&, uint32_t thread, uint64_t address, int bytes, bool atomic);
  const char* write(const Clock&, uint32_t thread, uint64_t address, int bytes, bool atomic);

  // The view that was released at an address.
  Clock::View& view(uint64_t address) { return views_[address]; }

  static constexpr int kPage = 4096;

 private:
  struct Access {
    uint32_t block = 0, epoch = 0, now = 0;
    uint16_t thread = 0;
    bool atomic = false;
  };
  struct Granule {
    Access write, read;
  };
  // Granules have 16 bytes at first, and fewer after a smaller access.
  struct Page {
    int granule = 16;
    std::vector<Granule> granules = std::vector<Granule>(kPage / 16);
  };

  Granule* find(uint64_t address, int bytes, int* count);
  bool ordered(const Access& earlier, const Clock& clock, uint32_t thread) const;

  Random& random_;
  uint32_t first_block_ = 1, next_block_ = 1;
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
  struct {
    uint64_t number = 0;
    Page* page = nullptr;
  } recent_[64];
  std::unordered_map<uint64_t, Clock::View> views_;
};

}  // namespace ptx
