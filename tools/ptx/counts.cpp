#include "counts.h"

#include <set>
#include <sstream>

namespace ptx {

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
  if (i.space != Space::kGlobal) return;
  std::set<uint64_t> sectors;
  for (int lane = 0; lane < touched.lanes; ++lane) {
    sectors.insert(touched.begin[lane] / Footprint::kSector);
    if (i.action != Action::kStore) footprint_.read(touched.begin[lane]);
    if (i.action != Action::kLoad) footprint_.write(touched.begin[lane]);
  }
  count_of(i).sectors += sectors.size();
}

std::string Counts::report() const {
  std::ostringstream out;
  out << program_.entry.name << '\n';
  for (size_t i = 0; i < counts_.size(); ++i) {
    const Statement& statement = *program_.code[i].statement;
    const Count& count = counts_[i];
    out << statement.line << '\t' << count.issues << '\t' << count.lanes << '\t' << count.sectors
        << '\t' << statement.opcode << '\n';
  }
  return out.str();
}

}  // namespace ptx
