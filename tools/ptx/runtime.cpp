#include "runtime.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace ptx {
namespace {

// Runs all blocks of a grid, with a few resident at a time.
void run(Launch& launch) {
  std::vector<uint32_t> order(launch.blocks);
  std::iota(order.begin(), order.end(), 0u);
  if (!launch.in_turn) {
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[launch.random.below(static_cast<uint32_t>(i))]);
    }
  }
  std::vector<std::unique_ptr<Block>> resident;
  size_t next = 0;
  while (true) {
    while (next < order.size() && resident.size() < runtime().resident_blocks) {
      resident.push_back(std::make_unique<Block>(launch, order[next++]));
    }
    if (resident.empty()) return;

    std::vector<std::pair<Block*, uint32_t>> runnable;
    for (const auto& block : resident) {
      for (uint32_t w = 0; w < block->warps(); ++w) {
        if (block->runnable(w)) runnable.emplace_back(block.get(), w);
      }
    }
    std::string where;
    if (runnable.empty()) {
      for (const auto& block : resident) where += block->waiting();
      throw Error("deadlock, all threads wait:" + where);
    }
    // Run several turns before listing the runnable warps again, because listing is slow.
    for (size_t turn = 0; turn < runnable.size(); ++turn) {
      const auto [block, warp] =
          runnable[launch.in_turn ? turn : launch.random.below(uint32_t(runnable.size()))];
      if (block->runnable(warp)) block->run(warp);
    }
    const auto done = std::remove_if(resident.begin(), resident.end(),
                                     [](const auto& block) { return block->finished(); });
    if (done != resident.end()) launch.steps = 0;
    resident.erase(done, resident.end());
    if (launch.steps > kMaxSteps) {
      throw Error("hang, no block of " + launch.program.entry.name + " finishes");
    }
  }
}

Program& program_of(Kernel& kernel, const std::string& name) {
  if (kernel.program == nullptr) {
    kernel.program =
        std::make_unique<Program>(decode(*kernel.module, kernel.module->entries.at(name)));
  }
  return *kernel.program;
}

}  // namespace

Runtime& runtime() {
  static Runtime runtime;
  return runtime;
}

void load(const std::string& text) {
  auto module = std::make_unique<Module>(parse(text));
  module->text = text;
  for (const auto& [name, entry] : module->entries) {
    Kernel& kernel = runtime().kernels[name];  // keeps max_dynamic_shared
    kernel.module = module.get();
    kernel.program = nullptr;
    kernel.counts = nullptr;
  }
  runtime().modules.push_back(std::move(module));
}

Status launch(const std::string& name, uint32_t blocks, uint32_t threads, int64_t shared_bytes,
              void** arguments) {
  constexpr uint32_t kMaxBlocks = 0x7fffffff, kMaxThreads = 1024;
  const auto found = runtime().kernels.find(name);
  if (found == runtime().kernels.end()) return kInvalidDeviceFunction;
  Kernel& kernel = found->second;
  if (blocks == 0 || blocks > kMaxBlocks || threads == 0 || threads > kMaxThreads ||
      shared_bytes > kernel.max_dynamic_shared) {
    return kInvalidConfiguration;
  }
  try {
    const Program& program = program_of(kernel, name);
    if (kernel.counts == nullptr) {
      kernel.counts = std::make_unique<Counts>(program, runtime().footprint);
    }
    std::vector<char> parameters(program.parameter_bytes);
    for (size_t p = 0; p < program.parameters_at.size(); ++p) {
      std::memcpy(&parameters[program.parameters_at[p]], arguments[p],
                  program.entry.parameters[p].bytes);
    }
    runtime().races.begin_launch();
    ++runtime().kernels_launched;
    Launch launch = {program,
                     blocks,
                     threads,
                     shared_bytes,
                     std::move(parameters),
                     runtime().seed == 0,
                     runtime().random,
                     runtime().memory,
                     runtime().races,
                     *kernel.counts};
    // Report reads of unwritten bytes after the run, because a race may have caused them.
    try {
      run(launch);
    } catch (const Error& error) {
      throw launch.unwritten.empty() ? error : Error(launch.unwritten + "; then " + error.what());
    }
    if (!launch.unwritten.empty()) throw Error(launch.unwritten);
  } catch (const Error& error) {
    runtime().error = error.what();
    return kLaunchFailure;
  }
  return kSuccess;
}

}  // namespace ptx

// --- For Python

using ptx::runtime;

extern "C" {

void ptx_configure(int64_t seed, int64_t resident_blocks) {
  runtime().seed = static_cast<uint64_t>(seed);
  runtime().random = ptx::Random(runtime().seed);
  runtime().resident_blocks = static_cast<uint32_t>(resident_blocks);
  runtime().footprint = {};
  runtime().kernels_launched = runtime().memsets = 0;
  for (auto& [name, kernel] : runtime().kernels) kernel.counts = nullptr;
}
void ptx_multiprocessors(int64_t count) { runtime().multiprocessors = static_cast<int>(count); }
void ptx_allocate(int64_t begin, int64_t bytes, int64_t written) {
  runtime().memory.add(begin, bytes, written != 0);
}
void ptx_free(int64_t begin) { runtime().memory.remove(begin); }
const char* ptx_error() { return runtime().error.c_str(); }
int64_t ptx_load(const char* text) {
  try {
    ptx::load(text);
  } catch (const ptx::Error& error) {
    runtime().error = error.what();
    return ptx::kInvalidPtx;
  }
  return ptx::kSuccess;
}
int64_t ptx_launch(const char* name, int64_t blocks, int64_t threads, int64_t shared_bytes,
                   void** arguments) {
  constexpr int64_t kMostShared = 227 << 10;  // limit per block on sm_90
  const auto kernel = runtime().kernels.find(name);
  if (kernel != runtime().kernels.end()) kernel->second.max_dynamic_shared = kMostShared;
  return ptx::launch(name, uint32_t(blocks), uint32_t(threads), shared_bytes, arguments);
}
// Counts since ptx_configure: sectors of device memory read and written, kernels launched, memsets.
// Counts::report of each kernel follows. Sectors and reports cover only launches with in_turn.
const char* ptx_counts() {
  const ptx::Footprint& footprint = runtime().footprint;
  std::string& report = runtime().report;
  report.clear();
  for (const uint64_t total : {footprint.sectors_read, footprint.sectors_written,
                               runtime().kernels_launched, runtime().memsets}) {
    report += std::to_string(total) + "\t";
  }
  report += "\n";
  for (const auto& [name, kernel] : runtime().kernels) {
    if (kernel.counts != nullptr) report += "\n" + kernel.counts->report();
  }
  return report.c_str();
}
// The PTX module that contains the kernel.
const char* ptx_text(const char* kernel) {
  return runtime().kernels.at(kernel).module->text.c_str();
}
}
