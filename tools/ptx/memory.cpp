#include "memory.h"

#include <algorithm>
#include <cstdio>

#include "lanes.h"

namespace ptx {

void Allocations::add(uint64_t begin, int64_t bytes, bool written) {
  all_[begin] = {begin, begin + bytes, std::vector<char>(written ? 0 : bytes)};
  last_ = nullptr;
}

Allocation* Allocations::find(uint64_t begin, int64_t bytes) {
  if (last_ == nullptr || !last_->contains(begin, bytes)) {
    auto next = all_.upper_bound(begin);
    if (next == all_.begin()) return nullptr;
    last_ = &(--next)->second;
  }
  return last_->contains(begin, bytes) ? last_ : nullptr;
}

std::string Allocations::nearest(uint64_t address) const {
  auto next = all_.upper_bound(address);
  if (next == all_.begin()) return "below all allocations";
  --next;
  char text[96];
  std::snprintf(text, sizeof(text), "%lld bytes after the start of an allocation of %lld",
                static_cast<long long>(address - next->second.begin),
                static_cast<long long>(next->second.end - next->second.begin));
  return text;
}

// --- Clock

Clock::Clock(uint32_t block, uint32_t threads) : block(block), threads(threads) {}

void Clock::join(View& into, const View& from) {
  for (const auto& [block, epoch] : from) into[block] = std::max(into[block], epoch);
}

void Clock::barrier() {
  ++epoch;
  for (const auto& [thread, view] : acquired_) join(view_, view);
  acquired_.clear();
}

void Clock::warp_barrier(uint32_t warp, uint32_t lanes) {
  std::array<uint32_t, kLanes> joined = {};
  Thread* const first = &threads[warp * kLanes];
  for_each_lane(lanes, [&](int lane) {
    for (int l = 0; l < kLanes; ++l) joined[l] = std::max(joined[l], first[lane].known[l]);
  });
  for_each_lane(lanes, [&](int lane) { joined[lane] = first[lane].now++; });
  for_each_lane(lanes, [&](int lane) { first[lane].known = joined; });
}

void Clock::release(uint32_t thread, View& into) {
  join(into, view_);
  for (const auto& [acquirer, view] : acquired_) {
    if (acquirer == thread) join(into, view);
  }
  join(into, {{block, epoch}});
}

bool Clock::after(uint32_t thread, uint32_t other, uint32_t other_thread, uint32_t other_epoch,
                  uint32_t other_now) const {
  if (other == block) {
    const bool same_warp = other_thread / kLanes == thread / kLanes;
    return other_thread == thread || other_epoch < epoch ||
           (same_warp && other_now <= threads[thread].known[other_thread % kLanes]);
  }
  const auto covers = [&](const View& view) {
    const auto found = view.find(other);
    return found != view.end() && other_epoch < found->second;
  };
  if (covers(view_)) return true;
  for (const auto& [acquirer, view] : acquired_) {
    if (acquirer == thread && covers(view)) return true;
  }
  return false;
}

// --- Races

void Races::forget(uint64_t begin, uint64_t end) {
  for (uint64_t page = begin / kPage; page < end / kPage; ++page) pages_.erase(page);
  for (auto& recent : recent_) recent = {};
}

Races::Granule* Races::find(uint64_t address, int bytes, int* count) {
  const uint64_t number = address / kPage;
  auto& recent = recent_[number % 64];
  if (recent.number != number || recent.page == nullptr) {
    std::unique_ptr<Page>& page = pages_[number];
    if (page == nullptr) page = std::make_unique<Page>();
    recent = {number, page.get()};
  }
  Page& page = *recent.page;
  if (bytes < page.granule) {
    std::vector<Granule> finer(kPage / bytes);
    for (size_t i = 0; i < finer.size(); ++i) finer[i] = page.granules[i * bytes / page.granule];
    page.granules = std::move(finer);
    page.granule = bytes;
  }
  *count = bytes / page.granule;
  return &page.granules[address % kPage / page.granule];
}

bool Races::ordered(const Access& earlier, const Clock& clock, uint32_t thread) const {
  return earlier.block < first_block_ ||
         clock.after(thread, earlier.block, earlier.thread, earlier.epoch, earlier.now);
}

const char* Races::read(const Clock& clock, uint32_t thread, uint64_t address, int bytes,
                        bool atomic) {
  const Access now = {clock.block, clock.epoch, clock.threads[thread].now,
                      static_cast<uint16_t>(thread), atomic};
  int count;
  Granule* granule = find(address, bytes, &count);
  for (int g = 0; g < count; ++g, ++granule) {
    if (!(atomic && granule->write.atomic) && !ordered(granule->write, clock, thread)) {
      return "a load is not ordered after another thread's store";
    }
    // Keep one of the unordered reads, at random, to compare with later writes.
    if (ordered(granule->read, clock, thread) || random_.below(2) == 0) granule->read = now;
  }
  return nullptr;
}

const char* Races::write(const Clock& clock, uint32_t thread, uint64_t address, int bytes,
                         bool atomic) {
  const Access now = {clock.block, clock.epoch, clock.threads[thread].now,
                      static_cast<uint16_t>(thread), atomic};
  int count;
  Granule* granule = find(address, bytes, &count);
  for (int g = 0; g < count; ++g, ++granule) {
    if (!(atomic && granule->write.atomic) && !ordered(granule->write, clock, thread)) {
      return "a store is not ordered after another thread's store";
    }
    if (!(atomic && granule->read.atomic) && !ordered(granule->read, clock, thread)) {
      return "a store is not ordered after another thread's load";
    }
    granule->write = now;
  }
  return nullptr;
}

}  // namespace ptx
