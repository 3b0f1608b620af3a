// collectives.cpp -- warp collectives. `lanes` is the mask of the participating lanes.
#include <cstring>

#include "functors.h"
#include "lanes.h"

namespace ptx {
namespace {

void sum(char* registers, const Instruction& i, uint32_t lanes) {
  const auto* from = lanes_of<const uint32_t>(registers, i.from[0]);
  uint32_t sum = 0;
  for_each_lane(lanes, [&](int lane) { sum += from[lane]; });
  auto* to = lanes_of<uint32_t>(registers, i.to[0]);
  for_each_lane(lanes, [&](int lane) { to[lane] = sum; });
}

uint32_t ballot_of(char* registers, Operand predicate, uint32_t lanes) {
  const auto* from = lanes_of<const uint8_t>(registers, predicate);
  uint32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result |= uint32_t{from[lane]} << lane;
  return result & lanes;
}
void ballot(char* registers, const Instruction& i, uint32_t lanes) {
  const uint32_t result = ballot_of(registers, i.from[0], lanes);
  auto* to = lanes_of<uint32_t>(registers, i.to[0]);
  for_each_lane(lanes, [&](int lane) { to[lane] = result; });
}
void any(char* registers, const Instruction& i, uint32_t lanes) {
  const bool result = ballot_of(registers, i.from[0], lanes) != 0;
  auto* to = lanes_of<uint8_t>(registers, i.to[0]);
  for_each_lane(lanes, [&](int lane) { to[lane] = result; });
}

enum class Shuffle { kUp, kButterfly, kIndex };
template <Shuffle kMode>
void shuffle(char* registers, const Instruction& i, uint32_t lanes) {
  uint32_t before[kLanes];
  std::memcpy(before, registers + i.from[0].at, sizeof(before));
  const auto* b = lanes_of<const uint32_t>(registers, i.from[1]);
  const auto* c = lanes_of<const uint32_t>(registers, i.from[2]);
  auto* to = lanes_of<uint32_t>(registers, i.to[0]);
  for_each_lane(lanes, [&](int lane) {
    const int amount = b[lane] & 31, clamp = c[lane] & 31, segment = c[lane] >> 8 & 31;
    const int last = (lane & segment) | (clamp & ~segment), first = lane & segment;
    int source = 0;
    bool within = false;
    switch (kMode) {
      case Shuffle::kUp:
        source = lane - amount;
        within = source >= last;
        break;
      case Shuffle::kButterfly:
        source = lane ^ amount;
        within = source <= last;
        break;
      case Shuffle::kIndex:
        source = first | (amount & ~segment);
        within = source <= last;
        break;
    }
    if (!within) source = lane;
    // The value from a lane that does not participate is undefined.
    to[lane] = (lanes >> source & 1) != 0 ? before[source] : 0xdeadbeef;
    if (i.to[1].at != kNone) lanes_of<uint8_t>(registers, i.to[1])[lane] = within;
  });
}

void nothing(char*, const Instruction&, uint32_t) {}

}  // namespace

void add_collectives(Forms& forms) {
  forms.insert({
      {"redux.sync.add.u32", {sum, {4}, {4, 4}, Kind::kCollective}},
      {"redux.sync.add.s32", {sum, {4}, {4, 4}, Kind::kCollective}},
      {"vote.sync.ballot.b32", {ballot, {4}, {1, 4}, Kind::kCollective}},
      {"vote.sync.any.pred", {any, {1}, {1, 4}, Kind::kCollective}},
      {"shfl.sync.up.b32", {shuffle<Shuffle::kUp>, {4, 1}, {4, 4, 4, 4}, Kind::kCollective}},
      {"shfl.sync.bfly.b32",
       {shuffle<Shuffle::kButterfly>, {4, 1}, {4, 4, 4, 4}, Kind::kCollective}},
      {"shfl.sync.idx.b32", {shuffle<Shuffle::kIndex>, {4, 1}, {4, 4, 4, 4}, Kind::kCollective}},
      {"bar.warp.sync", {nothing, {}, {4}, Kind::kCollective}},
  });
}

}  // namespace ptx
