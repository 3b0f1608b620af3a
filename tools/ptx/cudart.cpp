// cudart.cpp -- implements the part of the CUDA runtime that launchers call, on the executor.
//
// nvcc compiles the launchers. The compiled code registers the kernels and their PTX before main,
// and calls these functions to launch kernels.
#include <cuda_runtime_api.h>
#include <fatbinary_section.h>

#include <cstdlib>
#include <cstring>

#include "runtime.h"

using ptx::runtime;

namespace {

// Kernel names, by the address of the kernel's host stub.
std::map<const void*, std::string>& registered() {
  static std::map<const void*, std::string> names;
  return names;
}

// Returns the PTX in a fat binary. The format is undocumented (https://docs.nvidia.com/cuda/
// cuda-binary-utilities only mentions it). A header contains the kind of an entry, the size of the
// header, and the size of the data that follows.
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
  std::abort();  // compiled for a different architecture
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  ptx::load(embedded_ptx(wrapper));
  return nullptr;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  registered()[host] = name;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
// Used by kernel<<<...>>>, which launchers do not contain.
unsigned __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { std::abort(); }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  std::abort();
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host,
                                void** arguments) {
  const dim3 grid = config->gridDim, block = config->blockDim;
  if (grid.y * grid.z * block.y * block.z != 1) return cudaErrorNotSupported;
  return static_cast<cudaError_t>(
      ptx::launch(registered()[host], grid.x, block.x, config->dynamicSmemBytes, arguments));
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMultiProcessorCount) {
    *value = runtime().multiprocessors;
  } else if (attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor) {
    *value = 228 << 10;
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;  // a hint
  constexpr int kMaxBytes = 163 << 10;  // limit of sm_80, the oldest supported architecture
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > kMaxBytes) {
    return cudaErrorInvalidValue;
  }
  int64_t& allowed = runtime().kernels.at(registered().at(host)).max_dynamic_shared;
  if (allowed == value) return cudaErrorInvalidValue;  // launchers must set it only once per kernel
  allowed = value;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  const auto begin = reinterpret_cast<uint64_t>(data);
  ptx::Allocation* const allocation = runtime().memory.find(begin, static_cast<int64_t>(bytes));
  if (allocation == nullptr) {
    runtime().error = "cudaMemsetAsync: " + std::to_string(bytes) + " bytes out of bounds";
    return cudaErrorInvalidValue;
  }
  std::memset(data, value, bytes);
  if (char* const written = allocation->written_at(begin)) std::memset(written, 1, bytes);
  ++runtime().memsets;
  runtime().footprint.write(begin, static_cast<int64_t>(bytes));
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*data, 0xab, bytes);  // to detect kernels that rely on zeroed memory
  runtime().memory.add(reinterpret_cast<uint64_t>(*data), bytes, false);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  runtime().memory.remove(reinterpret_cast<uint64_t>(data));
  std::free(data);
  return cudaSuccess;
}
}
