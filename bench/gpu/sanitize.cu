// sanitize.cu -- every kernel on small inputs, for compute-sanitizer to watch.
//
// A program of its own, without Python and torch, which take the sanitizer longer than all kernels.
// Every array is an allocation of its own, of exactly its size: an access past its end shows.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "common/payload.h"
#include "common/rows.h"
#include "cuda/mask_pack.cuh"
#include "cuda/row_dequantize.cuh"
#include "cuda/row_gather.cuh"
#include "cuda/row_pack.cuh"
#include "cuda/row_quantize.cuh"
#include "cuda/row_unpack.cuh"
#include "cuda/sample_threshold.cuh"
#include "cuda/scatter_unpack.cuh"
#include "cuda/track_threshold.cuh"

namespace {

using dct::DType;

constexpr int64_t kNumel = 2 * 16384 + 77;  // three blocks, the last short and not a whole vector
constexpr int64_t kCapacity = 700, kSegments = 5, kRanks = 3, kRows = 33;
constexpr DType kFloats[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Device memory; uninitialised unless it is made of what the host has.
template <typename T>
class Array {
 public:
  explicit Array(int64_t size) {
    require(cudaMalloc(reinterpret_cast<void**>(&data_), size * sizeof(T)), "cudaMalloc");
  }
  Array(const std::vector<T>& values) : Array(static_cast<int64_t>(values.size())) {
    const size_t bytes = values.size() * sizeof(T);
    require(cudaMemcpy(data_, values.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  Array(const Array&) = delete;
  ~Array() { cudaFree(data_); }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
};
using Bytes = Array<uint8_t>;

std::mt19937 generator(0);

// Normal numbers; those of 16 bits are float32's upper halves, which are float16s of any size, too.
std::vector<uint8_t> normal(int64_t size, DType dtype) {
  std::normal_distribution<float> distribution;
  std::vector<uint8_t> bytes(size * dct::itemsize(dtype));
  for (int64_t i = 0; i < size; ++i) {
    const float x = distribution(generator);
    const auto* raw = reinterpret_cast<const uint8_t*>(&x);
    const int64_t each = dct::itemsize(dtype);
    for (int64_t b = 0; b < each; ++b) bytes[i * each + b] = raw[4 - each + b];
  }
  return bytes;
}

const float* floats(const Bytes& bytes) { return reinterpret_cast<const float*>(bytes.get()); }

void one_dimensional(DType grad_dtype, DType value_dtype, bool has_grad) {
  const Array<int64_t> segments(std::vector<int64_t>{0, 5000, 5000, 20000, 32000, kNumel});
  const Bytes grad(normal(kNumel, grad_dtype)), residual(normal(kNumel, DType::kFloat32));
  Array<float> threshold(kSegments);
  const dct::SampleThresholdArgs sample = {
      grad.get(), grad_dtype, floats(residual), segments.get(), kSegments, 0.01,
      5000,       7,          nullptr,          threshold.get()};
  Bytes sample_scratch(dct::cuda::sample_threshold_scratch_bytes(sample));
  require(dct::cuda::sample_threshold(sample, kNumel, sample_scratch.get(), nullptr), "sample");

  const int64_t nbytes = dct::payload_layout(kNumel, kCapacity, value_dtype, 1).nbytes;
  // Cleared: what no entry is written to travels as well.
  Bytes payloads(std::vector<uint8_t>(kRanks * nbytes, 0));
  Array<int32_t> seen(kSegments), status(std::vector<int32_t>(kRanks, 0));
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    Bytes own(normal(kNumel, DType::kFloat32));
    const dct::MaskPackArgs pack = {reinterpret_cast<float*>(own.get()),
                                    has_grad ? grad.get() : nullptr,
                                    grad_dtype,
                                    kNumel,
                                    segments.get(),
                                    threshold.get(),
                                    seen.get(),
                                    kSegments,
                                    payloads.get() + rank * nbytes,
                                    1,
                                    kCapacity,
                                    value_dtype,
                                    nullptr,
                                    status.get(),
                                    kRanks};
    Bytes scratch(dct::cuda::mask_pack_scratch_bytes(pack));
    require(dct::cuda::mask_pack(pack, scratch.get(), nullptr), "mask_pack");
    require(cudaDeviceSynchronize(), "mask_pack");
  }
  const Array<float> target(std::vector<float>(kSegments, 60)),
      reference(std::vector<float>(kSegments, 2));
  const dct::TrackThresholdArgs track = {threshold.get(), seen.get(), target.get(), reference.get(),
                                         kSegments};
  require(dct::cuda::track_threshold(track, nullptr), "track_threshold");

  Bytes out(normal(kNumel, grad_dtype));
  const dct::ScatterUnpackArgs unpack = {payloads.get(), kRanks,    1,          kCapacity,
                                         value_dtype,    out.get(), grad_dtype, kNumel,
                                         0.5f,           has_grad,  nullptr,    status.get()};
  require(dct::cuda::scatter_unpack(unpack, nullptr), "scatter_unpack");
  require(cudaDeviceSynchronize(), "scatter_unpack");
}

void rows(int64_t width, int64_t k, DType dtype, DType value_dtype) {
  const Bytes x(normal(kRows * width, dtype));
  Bytes values(kRows * k * dct::itemsize(value_dtype)),
      again(kRows * k * dct::itemsize(value_dtype));
  Bytes positions(kRows * dct::position_bytes(width, k)), out(kRows * width * dct::itemsize(dtype));
  require(
      dct::cuda::row_pack(
          {x.get(), dtype, kRows, width, k, values.get(), value_dtype, positions.get()}, nullptr),
      "row_pack");
  require(
      dct::cuda::row_gather(
          {x.get(), dtype, positions.get(), kRows, width, k, again.get(), value_dtype}, nullptr),
      "row_gather");
  require(
      dct::cuda::row_unpack(
          {values.get(), value_dtype, positions.get(), kRows, width, k, out.get(), dtype}, nullptr),
      "row_unpack");
  for (int format = 0; format < 4; ++format) {
    const auto as = static_cast<dct::RowFormat>(format);
    Bytes quantized(kRows * dct::row_bytes(width, as));
    require(dct::cuda::row_quantize({x.get(), dtype, kRows, width, as, quantized.get()}, nullptr),
            "row_quantize");
    require(
        dct::cuda::row_dequantize({quantized.get(), kRows, width, as, out.get(), dtype}, nullptr),
        "row_dequantize");
    require(cudaDeviceSynchronize(), "rows");
  }
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU\n");
    return 1;
  }
  for (DType dtype : kFloats) {
    for (DType value_dtype : {DType::kFloat32, DType::kBFloat16}) {
      one_dimensional(dtype, value_dtype, true);
    }
    // Bitmap, columns of one byte and of two; rows held by few lanes, by a warp and by a block.
    for (int64_t width : {33, 64, 200, 1000, 2100}) {
      for (int64_t k : {width / 20 + 1, width / 3}) rows(width, k, dtype, DType::kBFloat16);
    }
  }
  one_dimensional(DType::kFloat32, DType::kFloat32, false);
  std::printf("all kernels ran\n");
}
