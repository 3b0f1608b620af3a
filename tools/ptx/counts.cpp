#include "counts.h"

#include <algorithm>
#include <set>
#include <sstream>

namespace ptx {
namespace {

constexpr int kBanks = 32, kWord = 4;  // banks of shared memory, and bytes of a word in a bank

// The number of extra passes of an access. Accesses of 8 bytes are split into half warps, and
// accesses of 16 bytes into quarter warps. A bank needs a pass for each distinct word. For an
// atomic, a bank needs a pass for each lane, even if lanes use the same word.
uint64_t conflicts(const Touched& touched, int bytes, bool atomic) {
  const int words = std::max(bytes / kWord, 1), together = kLanes / words;
  uint64_t passes = 0;
  for (int first = 0; first < touched.lanes; first += together) {
    std::multiset<uint64_t> banks[kBanks];
    size_t most = 0;
    for (int lane = first; lane < std::min(first + together, touched.lanes); ++lane) {
      for (int w = 0; w < words; ++w) {
        const uint64_t word = touched.begin[lane] / kWord + w;
        auto& served = banks[word % kBanks];
        if (atomic || served.count(word) == 0) served.insert(word);
        most = std::max(most, served.size());
      }
    }
    passes += most - 1;
  }
  return passes;
}

}  // namespace

void Footprint::write(uint64_t begin, int64_t bytes) {
  for (uint64_t at = begin / kSector * kSector; at < begin + bytes; at += kSector) write(at);
}

void Footprint::touch(uint64_t address, State now) {
  const uint64_t sector = address / kSector;
  uint8_t& state = pages_[sector / kSectors][sector % kSectors];
  if (now == kWritten && (state & kWritten) == 0) ++sectors_written;
  if (now == kRead && state == 0) ++sectors_read;
  state |= now;
}

void Counts::access(const Instruction& i, const Touched& touched) {
  const bool atomic = i.action == Action::kAtomic;
  if (i.space == Space::kShared) {
    count_of(i).conflicts += conflicts(touched, i.element * i.count, atomic);
  } else if (i.space == Space::kGlobal) {
    std::set<uint64_t> sectors;
    for (int lane = 0; lane < touched.lanes; ++lane) {
      sectors.insert(touched.begin[lane] / Footprint::kSector);
      if (i.action != Action::kStore) footprint_.read(touched.begin[lane]);
      if (i.action != Action::kLoad) footprint_.write(touched.begin[lane]);
    }
    count_of(i).sectors += sectors.size();
  }
}

std::string Counts::report() const {
  std::ostringstream out;
  out << program_.entry.name << '\n';
  for (size_t i = 0; i < counts_.size(); ++i) {
    const Statement& statement = *program_.code[i].statement;
    const Count& count = counts_[i];
    out << statement.line << '\t' << count.issues << '\t' << count.lanes << '\t' << count.sectors
        << '\t' << count.conflicts << '\t' << statement.opcode << '\n';
  }
  return out.str();
}

}  // namespace ptx
