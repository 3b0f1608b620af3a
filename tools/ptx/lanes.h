// lanes.h -- the registers of a warp, lane by lane.
#pragma once

#include <cstring>

#include "program.h"

namespace ptx {

template <typename T>
T* lanes_of(char* registers, Operand operand) {
  return reinterpret_cast<T*>(registers + operand.at);
}

template <typename T>
T lane_value(const char* registers, Operand operand, int lane) {
  T value;
  std::memcpy(&value, registers + operand.at + lane * sizeof(T), sizeof(T));
  return value;
}

template <typename Body>
inline void for_each_lane(uint32_t lanes, Body body) {
  if (lanes == kAllLanes) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) body(lane);
  } else {
    for (; lanes != 0; lanes &= lanes - 1) body(__builtin_ctz(lanes));
  }
}

}  // namespace ptx
