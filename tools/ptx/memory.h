// memory.h -- where device memory is, what of it has been written, and which accesses to it and to
// shared memory are ordered.
//
// Two accesses to the same bytes, of which one writes and not both are atomic, must be ordered: by
// their thread's program, by bar.warp.sync or bar.sync, or by a release that is acquired. If they
// are not, that is an error, whatever they did to each other this time: PTX gives such a program no
// meaning.
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
  std::vector<char> written;  // of each byte, whether it has been; empty where the host has
  bool contains(uint64_t address, int64_t bytes) const {
    return begin <= address && address + bytes <= end;
  }
  // From a byte on; null where all have been.
  char* written_at(uint64_t address) {
    return written.empty() ? nullptr : &written[address - begin];
  }
};

// Device memory: the addresses are the host's.
class Allocations {
 public:
  void add(uint64_t begin, int64_t bytes, bool written);
  void remove(uint64_t begin) { all_.erase(begin), last_ = nullptr; }
  // The one that has all of these bytes, or null.
  Allocation* find(uint64_t begin, int64_t bytes);
  std::string nearest(uint64_t address) const;

 private:
  std::map<uint64_t, Allocation> all_;  // by their begins
  Allocation* last_ = nullptr;
};

// Of one block: which accesses of its own and of others its threads come after.
class Clock {
 public:
  // What a release publishes: by block, the epoch whose earlier ones are known. Kernels publish
  // what a block did before a barrier, never what a thread did since.
  using View = std::unordered_map<uint32_t, uint32_t>;

  Clock(uint32_t block, uint32_t threads);

  void barrier();
  void warp_barrier(uint32_t warp, uint32_t lanes);
  void acquire(uint32_t thread, const View& view) { acquired_.push_back({thread, view}); }
  void release(uint32_t thread, View& into);

  const uint32_t block;  // a number that no other block of any launch has
  uint32_t epoch = 1;    // barriers passed
  struct Thread {
    uint32_t now = 1;
    std::array<uint32_t, kLanes> known = {};  // of the lanes of its warp
  };
  std::vector<Thread> threads;

  // Whether an access by `other`, with these coordinates, came before `thread` gets here.
  bool after(uint32_t thread, uint32_t other, uint32_t other_thread, uint32_t other_epoch,
             uint32_t other_now) const;

 private:
  static void join(View& into, const View& from);
  View view_;
  std::vector<std::pair<uint32_t, View>> acquired_;  // by one thread, since the last barrier
};

class Races {
 public:
  explicit Races(Random& random) : random_(random) {}

  void begin_launch() { first_block_ = next_block_, views_.clear(); }
  uint32_t new_block() { return next_block_++; }
  // Nothing has happened yet in [begin, end), which are multiples of kPage.
  void forget(uint64_t begin, uint64_t end);

  // Each reports a conflict in words, or nullptr.
  const char* read(const Clock&, uint32_t thread, uint64_t address, int bytes, bool atomic);
  // A replica writes what is there already, which others may have written at the same time.
  const char* write(const Clock&, uint32_t thread, uint64_t address, int bytes, bool atomic,
                    bool replica = false);

  // What was released at an address.
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
  // Of 16 bytes at first; of fewer once something smaller is accessed.
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
