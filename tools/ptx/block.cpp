#include "block.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "lanes.h"

namespace ptx {
namespace {

constexpr uint32_t kMostAccesses = 6;  // log2 of the maximum number of accesses per turn

uint32_t lanes_where(const char* predicates) {
  uint32_t lanes = 0;
  for (int lane = 0; lane < kLanes; ++lane) lanes |= uint32_t(predicates[lane] != 0) << lane;
  return lanes;
}

}  // namespace

Block::Block(Launch& launch, uint32_t index)
    : launch_(launch),
      program_(launch.program),
      index_(index),
      clock_(launch.races.new_block(), (launch.threads + kLanes - 1) / kLanes * kLanes),
      shared_extents_(program_.shared),
      shared_(nullptr, std::free),
      live_(launch.threads) {
  if (program_.dynamic_shared) shared_extents_.back().end += launch.dynamic_shared_bytes;
  if (!shared_extents_.empty()) {
    const size_t pages = shared_extents_.back().end / Races::kPage + 1;
    shared_.reset(static_cast<char*>(std::aligned_alloc(Races::kPage, pages * Races::kPage)));
    std::memset(shared_.get(), 0xcd, pages * Races::kPage);
    const auto begin = reinterpret_cast<uint64_t>(shared_.get());
    launch_.races.forget(begin, begin + pages * Races::kPage);
    shared_written_.resize(pages * Races::kPage);
  }
  warps_.resize((live_ + kLanes - 1) / kLanes);
  for (uint32_t w = 0; w < warps_.size(); ++w) {
    Warp& warp = warps_[w];
    warp.number = w;
    warp.arena = program_.arena;
    const uint32_t lanes = std::min<uint32_t>(live_ - w * kLanes, kLanes);
    warp.live = kAllLanes >> (kLanes - lanes);
    warp.groups = {{warp.live, 0}};
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t t = w * kLanes + lane;
      const uint32_t values[kSpecials] = {t, index, launch.blocks};
      for (int s = 0; s < kSpecials; ++s) {
        std::memcpy(&warp.arena[program_.special[s] + 4 * lane], &values[s], 4);
      }
    }
  }
}

// Removes and returns the group that is furthest behind. Running it first lets lanes reconverge.
Block::Group Block::furthest_behind(Warp& warp) {
  const auto chosen = std::min_element(warp.groups.begin(), warp.groups.end(),
                                       [](const Group& a, const Group& b) { return a.at < b.at; });
  const Group group = *chosen;
  warp.groups.erase(chosen);
  return group;
}

void Block::run(uint32_t number) {
  Warp& warp = warps_[number];
  ++launch_.steps;
  Group group = furthest_behind(warp);
  uint32_t accesses = ~0u;
  if (!launch_.in_turn)
    accesses = 1 + launch_.random.below(1u << launch_.random.below(kMostAccesses + 1));
  for (; launch_.steps <= kMaxSteps; ++launch_.steps) {
    const Instruction& i = program_.code[group.at];
    if (i.labelled && !warp.groups.empty()) {
      bool behind = false;  // whether another group is further behind
      for (size_t g = warp.groups.size(); g-- > 0;) {
        if (warp.groups[g].at == group.at) {
          group.lanes |= warp.groups[g].lanes;
          warp.groups.erase(warp.groups.begin() + g);
        } else {
          behind |= warp.groups[g].at < group.at;
        }
      }
      if (behind) {
        warp.groups.push_back(group);
        return;
      }
    }
    uint32_t lanes = group.lanes;
    if (i.guarded) {
      const uint32_t holds = lanes_where(&warp.arena[i.guard.at]);
      lanes &= i.negated ? ~holds : holds;
    }
    if (launch_.in_turn) {
      launch_.counts.issue(i, i.kind == Kind::kBranch ? group.lanes : lanes);
    }
    switch (i.kind) {
      case Kind::kCompute:
        if (lanes != 0) i.run(warp.arena.data(), i, lanes);
        ++group.at;
        continue;
      case Kind::kBranch:
        branch(warp, group, i, lanes);
        continue;
      case Kind::kMemory:
        if (--accesses == 0) {
          warp.groups.push_back(group);
          return;
        }
        if (lanes != 0) access(warp, i, lanes);
        ++group.at;
        continue;
      default:
        break;
    }
    // Lanes with a false guard skip the instruction.
    if (lanes != group.lanes) warp.groups.push_back({group.lanes & ~lanes, group.at + 1});
    if (lanes == 0) return;
    group.lanes = lanes;
    switch (i.kind) {
      case Kind::kCollective:
        if (!collect(warp, group, i)) return;
        ++group.at;
        continue;
      case Kind::kBarrier:
        warp.at_barrier |= lanes;
        for_each_lane(lanes, [&](int lane) { warp.waits_at[lane] = group.at; });
        complete_barrier();
        return;
      default:
        leave(warp, lanes);
        return;
    }
  }
  warp.groups.push_back(group);
}

void Block::branch(Warp& warp, Group& group, const Instruction& i, uint32_t lanes) {
  if (lanes == 0) {
    ++group.at;
    return;
  }
  if (lanes != group.lanes) warp.groups.push_back({group.lanes & ~lanes, group.at + 1});
  group = {lanes, i.target};
}

// Runs the collective and returns true if the group contains all live lanes of its mask. Otherwise,
// the lanes of the group wait.
bool Block::collect(Warp& warp, const Group& group, const Instruction& i) {
  const Operand mask = *std::find_if(std::rbegin(i.from), std::rend(i.from),
                                     [](const Operand& o) { return o.at != kNone; });
  const int first = __builtin_ctz(group.lanes);
  const auto common = lane_value<uint32_t>(warp.arena.data(), mask, first);
  bool together = (common & warp.live) == group.lanes;
  for_each_lane(group.lanes, [&](int lane) {
    warp.waits_at[lane] = group.at;
    warp.waits_for[lane] = lane_value<uint32_t>(warp.arena.data(), mask, lane);
    if ((warp.waits_for[lane] >> lane & 1) == 0)
      fail(warp, lane, i, "its mask does not contain its own lane");
    together &= warp.waits_for[lane] == common;
  });
  if (together) {
    meet(warp, i, group.lanes);
    return true;
  }
  warp.in_collective |= group.lanes;
  complete_collectives(warp);
  return false;
}

void Block::meet(Warp& warp, const Instruction& i, uint32_t lanes) {
  i.run(warp.arena.data(), i, lanes);
  if (i.to[0].at == kNone) clock_.warp_barrier(warp.number, lanes);
}

void Block::complete_collectives(Warp& warp) {
  uint32_t incomplete = warp.in_collective;
  while (incomplete != 0) {
    const int first = __builtin_ctz(incomplete);
    const int32_t at = warp.waits_at[first];
    const uint32_t mask = warp.waits_for[first];
    const Instruction& i = program_.code[at];
    uint32_t waiting = 0;
    for_each_lane(warp.in_collective, [&](int lane) {
      const bool wants = mask >> lane & 1, wanted = warp.waits_for[lane] >> first & 1;
      if (warp.waits_at[lane] == at && warp.waits_for[lane] == mask) {
        waiting |= 1u << lane;
      } else if (wants && wanted) {
        char masks[64];
        std::snprintf(masks, sizeof(masks), "mask 0x%08x against 0x%08x", mask,
                      warp.waits_for[lane]);
        fail(warp, first, i,
             "it waits for lane " + std::to_string(lane) +
                 ", which waits for it at another instruction, " + masks + ": " +
                 place(program_.code[warp.waits_at[lane]]));
      }
    });
    incomplete &= ~waiting;
    if ((mask & warp.live) != waiting) continue;
    meet(warp, i, waiting);
    warp.in_collective &= ~waiting;
    warp.groups.push_back({waiting, at + 1});
  }
}

void Block::complete_barrier() {
  for (const Warp& warp : warps_) {
    if (warp.at_barrier != warp.live) return;
  }
  for (Warp& warp : warps_) {
    if (warp.live == 0) continue;
    const int first = __builtin_ctz(warp.live);
    for_each_lane(warp.live, [&](int lane) {
      if (warp.waits_at[lane] == warp.waits_at[first]) return;
      fail(warp, lane, program_.code[warp.waits_at[lane]],
           "other lanes of its warp are at another barrier: " +
               place(program_.code[warp.waits_at[first]]));
    });
    warp.groups = {{warp.live, warp.waits_at[first] + 1}};
    warp.at_barrier = 0;
  }
  clock_.barrier();
}

void Block::leave(Warp& warp, uint32_t lanes) {
  warp.live &= ~lanes;
  live_ -= __builtin_popcount(lanes);
  complete_collectives(warp);
  if (live_ != 0) complete_barrier();
}

void Block::fail(const Warp& warp, int lane, const Instruction& i, const std::string& what) const {
  throw Error(described(warp, lane, i, what));
}

std::string Block::described(const Warp& warp, int lane, const Instruction& i,
                             const std::string& what) const {
  return what + ": block " + std::to_string(index_) + ", thread " +
         std::to_string(warp.number * kLanes + lane) + ", " + place(i);
}

std::string Block::place(const Instruction& i) const {
  return program_.entry.name + ", PTX line " + std::to_string(i.statement->line) + ": " +
         i.statement->text;
}

std::string Block::waiting() const {
  std::map<std::string, uint32_t> threads;
  for (const Warp& warp : warps_) {
    for_each_lane(warp.in_collective | warp.at_barrier, [&](int lane) {
      threads[(warp.at_barrier >> lane & 1 ? "at a barrier, " : "in a collective, ") +
              place(program_.code[warp.waits_at[lane]])]++;
    });
  }
  std::string text;
  for (const auto& [where, count] : threads) {
    text +=
        "\n  block " + std::to_string(index_) + ", " + std::to_string(count) + " threads " + where;
  }
  return text;
}

}  // namespace ptx
