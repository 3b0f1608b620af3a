// forms.h -- implements an opcode with a function of the operands of one lane.
#pragma once

#include <tuple>
#include <utility>

#include "lanes.h"

namespace ptx {

template <auto f, typename To, typename... From, size_t... I>
void run_lanes(char* registers, const Instruction& i, uint32_t lanes, std::index_sequence<I...>) {
  To* to = lanes_of<To>(registers, i.to[0]);
  const auto from = std::make_tuple(lanes_of<const From>(registers, i.from[I])...);
  for_each_lane(lanes,
                [&](int lane) { to[lane] = static_cast<To>(f(std::get<I>(from)[lane]...)); });
}
template <auto f, typename To, typename... From>
Form form() {
  const auto run_all = [](char* registers, const Instruction& i, uint32_t lanes) {
    run_lanes<f, To, From...>(registers, i, lanes, std::index_sequence_for<From...>());
  };
  return {run_all, {sizeof(To)}, {sizeof(From)...}};
}

}  // namespace ptx
