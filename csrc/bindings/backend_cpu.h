#pragma once

// Runs the kernels of ops.cpp on CPU tensors, with torch's threads.

#include <torch/csrc/stable/ops.h>

#include "../cpu/kernels.h"
#include "checks.h"

#define DCT_DISPATCH_KEY CPU

namespace dct::backend {

using namespace cpu;

template <typename Kernel, typename Args>
void run(const Checks&, Kernel kernel, const Args& args) {
  static constexpr auto run_tasks = [](int64_t tasks, FunctionRef<void(int64_t)> body) {
    torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) body(task);
    });
  };
  // torch.set_num_threads() sets the number of threads.
  kernel(args, Parallel{torch::stable::get_num_threads(), run_tasks});
}

}  // namespace dct::backend
