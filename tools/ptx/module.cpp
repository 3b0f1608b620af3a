// module.cpp -- C functions around the launchers, which backend.py calls with ctypes.
//
// Each function takes the fields of the launcher's argument struct (common/ops.h) in declaration
// order, and returns a cudaError_t.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda/kernels.cuh"

namespace {

// An address, an integer, an enumerator's value, or a double.
union Field {
  int64_t integer;
  double number;

  template <typename T>
  operator T() const {
    if constexpr (std::is_pointer_v<T>)
      return reinterpret_cast<T>(integer);
    else if constexpr (std::is_floating_point_v<T>)
      return static_cast<T>(number);
    else
      return static_cast<T>(integer);
  }
};

template <typename Args, size_t... I>
Args fill(const Field* fields, std::index_sequence<I...>) {
  return {fields[I]...};
}
template <typename Args, size_t kFields>
Args fill(const Field* fields) {
  return fill<Args>(fields, std::make_index_sequence<kFields>());
}

void* given_scratch = nullptr;  // shared by all calls; if null, each call allocates its scratch

struct Scratch {
  void* data = given_scratch;
  explicit Scratch(int64_t bytes) {
    if (data == nullptr) cudaMalloc(&data, bytes);
  }
  ~Scratch() {
    if (data != given_scratch) cudaFree(data);
  }
};

void* given_stream = nullptr;  // of all calls

cudaStream_t stream() { return static_cast<cudaStream_t>(given_stream); }

int64_t size_factor = 1;  // mask_pack uses the tile sizes of a tensor this many times as large

}  // namespace

extern "C" {

void give_scratch(void* data) { given_scratch = data; }

void give_stream(void* stream) { given_stream = stream; }

void mask_pack_size_factor(int64_t factor) { size_factor = factor; }

int64_t mask_pack(const Field* fields) {
  const auto args = fill<dct::MaskPackArgs, 11>(fields);
  dct::MaskPackArgs large = args;
  large.numel *= size_factor;
  large.capacity *= size_factor;
  const dct::cuda::MaskPackSizes sizes = dct::cuda::mask_pack_sizes(large);
  const Scratch scratch(dct::cuda::mask_pack_scratch_bytes(args, sizes));
  return dct::cuda::mask_pack(args, sizes, scratch.data, stream());
}
int64_t sample_threshold(const Field* fields) {
  const auto args = fill<dct::SampleThresholdArgs, 10>(fields);
  const Scratch scratch(dct::cuda::sample_threshold_scratch_bytes(args));
  return dct::cuda::sample_threshold(args, scratch.data, stream());
}
int64_t scatter_unpack(const Field* fields) {
  return dct::cuda::scatter_unpack(fill<dct::ScatterUnpackArgs, 11>(fields), stream());
}
int64_t quantize_pack(const Field* fields) {
  return dct::cuda::quantize_pack(fill<dct::QuantizePackArgs, 10>(fields), stream());
}
int64_t dequantize_sum(const Field* fields) {
  return dct::cuda::dequantize_sum(fill<dct::DequantizeSumArgs, 13>(fields), stream());
}
int64_t row_pack(const Field* fields) {
  return dct::cuda::row_pack(fill<dct::RowPackArgs, 8>(fields), stream());
}
int64_t row_gather(const Field* fields) {
  return dct::cuda::row_gather(fill<dct::RowGatherArgs, 8>(fields), stream());
}
int64_t row_unpack(const Field* fields) {
  return dct::cuda::row_unpack(fill<dct::RowUnpackArgs, 8>(fields), stream());
}
int64_t row_quantize(const Field* fields) {
  return dct::cuda::row_quantize(fill<dct::RowQuantizeArgs, 6>(fields), stream());
}
int64_t row_dequantize(const Field* fields) {
  return dct::cuda::row_dequantize(fill<dct::RowDequantizeArgs, 6>(fields), stream());
}
int64_t row_dequantize_sum(const Field* fields) {
  return dct::cuda::row_dequantize_sum(fill<dct::RowDequantizeSumArgs, 7>(fields), stream());
}
int64_t diff_pack(const Field* fields) {
  const auto args = fill<dct::DiffPackArgs, 8>(fields);
  const Scratch scratch(dct::cuda::diff_pack_scratch_bytes(args));
  return dct::cuda::diff_pack(args, scratch.data, stream());
}
int64_t patch_apply(const Field* fields) {
  return dct::cuda::patch_apply(fill<dct::PatchApplyArgs, 6>(fields), stream());
}
int64_t checksum(const Field* fields) {
  return dct::cuda::checksum(fill<dct::ChecksumArgs, 3>(fields), stream());
}
}
