#pragma once

// Runs the kernels of ops.cpp on CUDA tensors, on the current stream of their device. Scratch
// memory comes from torch's caching allocator. Nothing here synchronizes with the host.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <stdexcept>
#include <string>

#include "../cuda/kernels.cuh"
#include "checks.h"

#define DCT_DISPATCH_KEY CUDA

namespace dct::backend {

using namespace cuda;

// The current stream of a tensor's device. This object also makes that device the current one.
class Stream {
 public:
  explicit Stream(const Tensor& tensor) : tensor_(tensor), guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  operator cudaStream_t() const { return stream_; }

  Tensor scratch(int64_t nbytes) const {
    return torch::stable::new_empty(tensor_, {nbytes}, ScalarType::Byte);
  }

 private:
  const Tensor& tensor_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

inline cudaError_t sample_threshold(const SampleThresholdArgs& args, const Stream& stream) {
  const Tensor scratch = stream.scratch(sample_threshold_scratch_bytes(args));
  return cuda::sample_threshold(args, scratch.mutable_data_ptr(), stream);
}

inline cudaError_t mask_pack(const MaskPackArgs& args, const Stream& stream) {
  const MaskPackSizes sizes = mask_pack_sizes(args);
  const Tensor scratch = stream.scratch(mask_pack_scratch_bytes(args, sizes));
  return cuda::mask_pack(args, sizes, scratch.mutable_data_ptr(), stream);
}

inline cudaError_t diff_pack(const DiffPackArgs& args, const Stream& stream) {
  const Tensor scratch = stream.scratch(diff_pack_scratch_bytes(args));
  return cuda::diff_pack(args, scratch.mutable_data_ptr(), stream);
}

template <typename Kernel, typename Args>
void run(const Checks& checks, Kernel kernel, const Args& args) {
  const cudaError_t error = kernel(args, Stream(checks.like));
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which another library could report as its own
  throw std::runtime_error(std::string("dct::") + checks.op +
                           ": CUDA error: " + cudaGetErrorString(error));
}

}  // namespace dct::backend
