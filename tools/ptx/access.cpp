// access.cpp -- memory accesses of a block.
#include <cstring>

#include "block.h"

namespace ptx {
namespace {

uint64_t register_value(const char* registers, Operand operand, int lane) {
  uint64_t value = 0;
  std::memcpy(&value, registers + operand.at + lane * operand.bytes, operand.bytes);
  return value;
}

}  // namespace

void Block::access(Warp& warp, const Instruction& i, uint32_t lanes) {
  char* const registers = warp.arena.data();
  if (launch_.in_turn) {
    Touched touched;
    for (; lanes != 0; lanes &= lanes - 1) {
      touched.add(access(warp, i, __builtin_ctz(lanes), registers));
    }
    launch_.counts.access(i, touched);
    return;
  }
  // The order of lanes is random, because kernels must not rely on it.
  const uint32_t start = launch_.random.below(kLanes);
  for (uint32_t n = 0; n < kLanes; ++n) {
    const int lane = (start + n) % kLanes;
    if ((lanes >> lane & 1) != 0) access(warp, i, lane, registers);
  }
}

uint64_t Block::access(const Warp& warp, const Instruction& i, int lane, char* registers) {
  const int bytes = i.element * i.count;
  int64_t address = i.displacement;
  if (i.address.at != kNone) address += register_value(registers, i.address, lane);
  if (i.address.bytes == 4) address = static_cast<uint32_t>(address);
  const Place place = locate(warp, i, lane, address, bytes);
  char* memory = place.memory;
  order(warp, i, lane, address, memory, bytes);
  track(warp, i, lane, address, place, bytes);

  const auto begin = reinterpret_cast<uint64_t>(memory);
  const uint32_t thread = warp.number * kLanes + lane;
  for (int e = 0; e < i.count; ++e, memory += i.element) {
    uint64_t old = 0;
    std::memcpy(&old, memory, i.element);
    if (i.action != Action::kLoad) {
      uint64_t value = register_value(registers, i.from[e], lane);
      if (i.action == Action::kAtomic) value = i.update(old, value);
      std::memcpy(memory, &value, i.element);
    }
    if (i.to[e].at == kNone) continue;
    const int unused = 64 - 8 * i.element;
    if (i.is_signed) old = static_cast<int64_t>(old << unused) >> unused;
    const Operand to = i.to[e];
    std::memcpy(registers + to.at + lane * to.bytes, &old, to.bytes);
  }
  if (i.ordered) {
    Clock::View& view = launch_.races.view(reinterpret_cast<uint64_t>(memory) - i.element);
    clock_.acquire(thread, view);
    clock_.release(thread, view);
  }
  return begin;
}

Block::Place Block::locate(const Warp& warp, const Instruction& i, int lane, int64_t address,
                           int bytes) {
  const auto at = [&] { return " at address " + std::to_string(address); };
  Place place = {reinterpret_cast<char*>(address), nullptr};
  bool within = false;
  std::string bounds;
  switch (i.space) {
    case Space::kParameter:
      within = address >= 0 && address + bytes <= program_.parameter_bytes;
      place.memory = launch_.parameters.data() + address;
      break;
    case Space::kShared:
      for (const Extent& extent : shared_extents_) {
        within |= extent.begin <= address && address + bytes <= extent.end;
      }
      place = {shared_.get() + address, shared_written_.data() + address};
      break;
    case Space::kGlobal:
      if (Allocation* allocation = launch_.memory.find(address, bytes)) {
        within = true;
        place.written = allocation->written_at(address);
      } else {
        bounds = ", " + launch_.memory.nearest(address);
      }
      break;
  }
  if (!within) fail(warp, lane, i, std::to_string(bytes) + " bytes out of bounds" + at() + bounds);
  if (address % bytes != 0) fail(warp, lane, i, std::to_string(bytes) + " bytes misaligned" + at());
  return place;
}

void Block::order(const Warp& warp, const Instruction& i, int lane, int64_t address, char* memory,
                  int bytes) {
  if (i.space == Space::kParameter) return;
  const uint32_t thread = warp.number * kLanes + lane;
  Races& races = launch_.races;
  const bool atomic = i.action == Action::kAtomic;
  const auto begin = reinterpret_cast<uint64_t>(memory);
  const char* conflict = nullptr;
  if (i.action != Action::kStore) conflict = races.read(clock_, thread, begin, bytes, atomic);
  if (i.action != Action::kLoad && conflict == nullptr) {
    conflict = races.write(clock_, thread, begin, bytes, atomic);
  }
  if (conflict != nullptr) {
    fail(warp, lane, i, "data race at address " + std::to_string(address) + ": " + conflict);
  }
}

void Block::track(const Warp& warp, const Instruction& i, int lane, int64_t address,
                  const Place& place, int bytes) {
  if (place.written == nullptr) return;
  if (i.action != Action::kStore && launch_.unwritten.empty() &&
      std::memchr(place.written, 0, bytes) != nullptr) {
    launch_.unwritten = described(
        warp, lane, i,
        std::to_string(bytes) + " bytes uninitialized at address " + std::to_string(address));
  }
  if (i.action != Action::kLoad) std::memset(place.written, 1, bytes);
}

}  // namespace ptx
