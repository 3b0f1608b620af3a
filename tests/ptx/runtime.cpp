// runtime.cpp -- the part of CUDA's runtime that launchers call, on the executor.
//
// Launchers are compiled by nvcc. What it makes registers its kernels and their PTX before main,
// and calls these functions to launch them.
#include <cuda_runtime_api.h>
#include <fatbinary_section.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>

#include "block.h"

namespace ptx {
namespace {

constexpr uint64_t kMaxSleeps = 1 << 18;  // while no block finishes
constexpr uint64_t kMaxSteps = uint64_t{1} << 32;

struct Kernel {
  const Module* module;
  std::unique_ptr<Program> program;  // once it is launched
  std::unique_ptr<Counts> counts;    // of its launches since the last configure
  int64_t max_dynamic_shared = 48 << 10;
};

struct Runtime {
  std::vector<std::unique_ptr<Module>> modules;
  std::map<std::string, Kernel> kernels;
  std::map<const void*, std::string> registered;  // by the address of the host's stub
  Allocations memory;
  uint64_t seed = 0;
  uint32_t resident_blocks = 3;
  Random random{0};
  Races races{random};
  Footprint footprint;
  uint64_t launches = 0;  // of kernels and memsets, since the last configure
  std::string error, report;
};

Runtime& runtime() {
  static Runtime runtime;
  return runtime;
}

void load(const std::string& text) {
  auto module = std::make_unique<Module>(parse(text));
  module->text = text;
  for (const auto& [name, entry] : module->entries) {
    runtime().kernels[name] = {module.get(), nullptr, nullptr};
  }
  runtime().modules.push_back(std::move(module));
}

// Runs all blocks of a grid, some at a time.
void run(Launch& launch) {
  std::vector<uint64_t> order(launch.grid.count());
  std::iota(order.begin(), order.end(), uint64_t{0});
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
      throw Error("deadlock, every thread waits:" + where);
    }
    // Several turns in one round, since it has a cost.
    for (size_t turn = 0; turn < runnable.size(); ++turn) {
      const auto [block, warp] =
          runnable[launch.in_turn ? turn : launch.random.below(uint32_t(runnable.size()))];
      if (block->runnable(warp)) block->run(warp);
    }
    const auto done = std::remove_if(resident.begin(), resident.end(),
                                     [](const auto& block) { return block->finished(); });
    if (done != resident.end()) launch.sleeps = launch.steps = 0;
    resident.erase(done, resident.end());
    if (launch.sleeps > kMaxSleeps || launch.steps > kMaxSteps) {
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

cudaError_t launch(const std::string& name, Dimensions grid, Dimensions block, int64_t shared_bytes,
                   void** arguments) {
  constexpr uint64_t kMaxGridX = 0x7fffffff, kMaxGridYZ = 0xffff, kMaxThreads = 1024;
  const auto found = runtime().kernels.find(name);
  if (found == runtime().kernels.end()) return cudaErrorInvalidDeviceFunction;
  Kernel& kernel = found->second;
  if (grid.count() == 0 || grid.x > kMaxGridX || grid.y > kMaxGridYZ || grid.z > kMaxGridYZ ||
      block.count() == 0 || block.count() > kMaxThreads ||
      shared_bytes > kernel.max_dynamic_shared) {
    return cudaErrorInvalidConfiguration;
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
    kernel.counts->launch(shared_bytes);
    ++runtime().launches;
    Launch launch = {program,
                     grid,
                     block,
                     shared_bytes,
                     std::move(parameters),
                     runtime().seed == 0,
                     runtime().random,
                     runtime().memory,
                     runtime().races,
                     *kernel.counts};
    run(launch);
  } catch (const Error& error) {
    runtime().error = error.what();
    return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}

// The PTX in what nvcc embeds: https://docs.nvidia.com/cuda/cuda-binary-utilities names the format,
// nothing describes it. An entry begins with its kind, the size of this head and that of what
// follows.
std::string embedded_ptx(const void* wrapper) {
  const auto* bytes =
      reinterpret_cast<const char*>(static_cast<const __fatBinC_Wrapper_t*>(wrapper)->data);
  const auto read = [](const char* from, auto value) {
    std::memcpy(&value, from, sizeof(value));
    return value;
  };
  constexpr uint16_t kPtx = 1;
  const char* entry = bytes + read(bytes + 6, uint16_t{});
  const char* const end = entry + read(bytes + 8, uint64_t{});
  while (entry < end) {
    const auto head = read(entry + 4, uint32_t{});
    const auto size = read(entry + 8, uint64_t{});
    if (read(entry, uint16_t{}) == kPtx) return std::string(entry + head, size).c_str();
    entry += head + size;
  }
  std::abort();  // it was compiled for another architecture
}

}  // namespace
}  // namespace ptx

using ptx::runtime;

extern "C" {

// --- For Python

void ptx_configure(int64_t seed, int64_t resident_blocks) {
  runtime().seed = static_cast<uint64_t>(seed);
  runtime().random = ptx::Random(runtime().seed);
  runtime().resident_blocks = static_cast<uint32_t>(resident_blocks);
  runtime().footprint = {};
  runtime().launches = 0;
  for (auto& [name, kernel] : runtime().kernels) kernel.counts = nullptr;
}
void ptx_allocate(int64_t begin, int64_t bytes) { runtime().memory.add(begin, bytes); }
void ptx_free(int64_t begin) { runtime().memory.remove(begin); }
const char* ptx_error() { return runtime().error.c_str(); }
int64_t ptx_load(const char* text) {
  try {
    ptx::load(text);
  } catch (const ptx::Error& error) {
    runtime().error = error.what();
    return cudaErrorInvalidPtx;
  }
  return cudaSuccess;
}
int64_t ptx_launch(const char* name, int64_t blocks, int64_t threads, int64_t shared_bytes,
                   void** arguments) {
  return ptx::launch(name, {uint32_t(blocks)}, {uint32_t(threads)}, shared_bytes, arguments);
}
// Since ptx_configure: sectors of device memory read, written, launches; then what Counts::report
// says of each kernel. Only what ran in turn is counted.
const char* ptx_counts() {
  const ptx::Footprint& footprint = runtime().footprint;
  std::string& report = runtime().report;
  report = std::to_string(footprint.sectors_read) + "\t" +
           std::to_string(footprint.sectors_written) + "\t" + std::to_string(runtime().launches) +
           "\n";
  for (const auto& [name, kernel] : runtime().kernels) {
    if (kernel.counts != nullptr) report += "\n" + kernel.counts->report();
  }
  return report.c_str();
}
// The PTX that a kernel is part of.
const char* ptx_text(const char* kernel) {
  return runtime().kernels.at(kernel).module->text.c_str();
}
// A warp that comes to this line of a kernel waits for so many trips to memory.
void ptx_wait(const char* kernel, int64_t line, double trips) {
  for (ptx::Instruction& i : ptx::program_of(runtime().kernels.at(kernel), kernel).code) {
    if (i.statement->line == line) i.trips = static_cast<float>(trips);
  }
}

// --- For what nvcc makes

void** __cudaRegisterFatBinary(void* wrapper) {
  ptx::load(ptx::embedded_ptx(wrapper));
  return nullptr;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  runtime().registered[host] = name;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
// Behind kernel<<<...>>>, which launchers do not use.
unsigned __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { std::abort(); }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  std::abort();
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host,
                                void** arguments) {
  const dim3 grid = config->gridDim, block = config->blockDim;
  return ptx::launch(runtime().registered[host], {grid.x, grid.y, grid.z},
                     {block.x, block.y, block.z}, config->dynamicSmemBytes, arguments);
}
cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;  // a hint
  constexpr int kMaxBytes = 163 << 10;  // of sm_80, the smallest that the kernels are built for
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > kMaxBytes) {
    return cudaErrorInvalidValue;
  }
  runtime().kernels.at(runtime().registered.at(host)).max_dynamic_shared = value;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  if (!runtime().memory.contains(reinterpret_cast<uint64_t>(data), bytes)) {
    runtime().error = "cudaMemsetAsync: " + std::to_string(bytes) + " bytes out of bounds";
    return cudaErrorInvalidValue;
  }
  std::memset(data, value, bytes);
  ++runtime().launches;
  runtime().footprint.write(reinterpret_cast<uint64_t>(data), static_cast<int64_t>(bytes));
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*data, 0xab, bytes);  // a kernel that relies on cleared memory is found out
  runtime().memory.add(reinterpret_cast<uint64_t>(*data), bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  runtime().memory.remove(reinterpret_cast<uint64_t>(data));
  std::free(data);
  return cudaSuccess;
}
}
