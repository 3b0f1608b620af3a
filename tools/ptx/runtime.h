// runtime.h -- loaded kernels, device memory, and launches.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "block.h"

namespace ptx {

// Return values of public functions, as in cudaError_t.
enum Status : int {
  kSuccess = 0,
  kInvalidConfiguration = 9,
  kInvalidDeviceFunction = 98,
  kInvalidPtx = 218,
  kLaunchFailure = 719,
};

struct Kernel {
  const Module* module = nullptr;
  std::unique_ptr<Program> program;  // decoded at the first launch
  std::unique_ptr<Counts> counts;    // of launches since the last ptx_configure
  int64_t max_dynamic_shared = 48 << 10;
};

struct Runtime {
  std::vector<std::unique_ptr<Module>> modules;
  std::map<std::string, Kernel> kernels;
  Allocations memory;
  uint64_t seed = 0;
  uint32_t resident_blocks = 3;
  int multiprocessors = 132;  // as on an H100 and an H200
  Random random{0};
  Races races{random};
  Footprint footprint;
  uint64_t kernels_launched = 0, memsets = 0;  // since the last ptx_configure
  std::string error, report;
};

Runtime& runtime();

void load(const std::string& text);
// Each argument is a pointer to the value of a parameter.
Status launch(const std::string& name, uint32_t blocks, uint32_t threads, int64_t shared_bytes,
              void** arguments);

}  // namespace ptx
