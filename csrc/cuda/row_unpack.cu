// row_unpack.cu -- dense rows from packed ones.
//
// A warp builds a narrow row in shared memory and writes it out once. A block clears a wide row in
// place and scatters into it: the row is still in the cache by then.
#include "detail/launch.cuh"
#include "detail/positions.cuh"
#include "detail/row_elements.cuh"
#include "detail/vectors.cuh"
#include "row_unpack.cuh"

namespace dct::cuda {
namespace {

struct Policy {
  static constexpr int kThreads = 256;
  static constexpr int kRowBytes = 4096;  // of a narrow row: 32 KB of shared memory a block
};
constexpr int kWarps = Policy::kThreads / kWarpSize;

// A row that a warp builds.
struct alignas(16) Stage {
  unsigned char bytes[Policy::kRowBytes];
};
struct NarrowShared {
  Stage row[kWarps];
  ScanStorage<kWarpSize> scan;
};

__device__ void spread(const RowUnpackArgs& args, int64_t row, void* target, int64_t slot,
                       int column) {
  if (column < 0) return;
  const float x = load_element(args.values, row * args.k + slot, args.value_dtype);
  store_element(target, column, x, args.out_dtype);
}

__global__ void __launch_bounds__(Policy::kThreads)
    row_unpack_narrow_kernel(RowUnpackArgs args, bool aligned) {
  DCT_SHARED(NarrowShared, shared);
  const int64_t row = int64_t{blockIdx.x} * kWarps + warp_index();
  if (row >= args.rows) return;
  Stage& stage = shared.row[warp_index()];
  const int bytes = static_cast<int>(args.width * itemsize(args.out_dtype));
  auto* vectors = reinterpret_cast<uint4*>(stage.bytes);
  for (int i = lane_index(); i * 16 < bytes; i += kWarpSize) vectors[i] = make_uint4(0, 0, 0, 0);
  __syncwarp();

  const uint8_t* positions = args.positions + row * position_bytes(args.width, args.k);
  for_each_slot<kWarpSize>(
      positions, args.width, args.k, shared.scan,
      [&](int64_t slot, int column) { spread(args, row, stage.bytes, slot, column); });
  __syncwarp();

  auto* out = static_cast<unsigned char*>(args.out) + row * bytes;
  if (aligned) {
    for (int i = lane_index(); i * 16 < bytes; i += kWarpSize) {
      __stcs(reinterpret_cast<uint4*>(out) + i, vectors[i]);
    }
  } else if (args.out_dtype == DType::kFloat32) {
    for (int i = lane_index(); i * 4 < bytes; i += kWarpSize) {
      reinterpret_cast<uint32_t*>(out)[i] = reinterpret_cast<const uint32_t*>(stage.bytes)[i];
    }
  } else {
    for (int i = lane_index(); i * 2 < bytes; i += kWarpSize) {
      reinterpret_cast<uint16_t*>(out)[i] = reinterpret_cast<const uint16_t*>(stage.bytes)[i];
    }
  }
}

__global__ void __launch_bounds__(Policy::kThreads) row_unpack_wide_kernel(RowUnpackArgs args) {
  DCT_SHARED(ScanStorage<Policy::kThreads>, storage);
  const int64_t row = blockIdx.x;
  const int64_t size = itemsize(args.out_dtype);
  auto* out = static_cast<unsigned char*>(args.out) + row * args.width * size;
  for (int64_t i = thread_index(); i < args.width; i += Policy::kThreads) {
    store_element(out, i, 0.0f, args.out_dtype);
  }
  __syncthreads();
  const uint8_t* positions = args.positions + row * position_bytes(args.width, args.k);
  for_each_slot<Policy::kThreads>(
      positions, args.width, args.k, storage,
      [&](int64_t slot, int column) { spread(args, row, out, slot, column); });
}

}  // namespace

cudaError_t row_unpack(const RowUnpackArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  const int64_t bytes = args.width * itemsize(args.out_dtype);
  const bool narrow = bytes <= Policy::kRowBytes;
  const int64_t blocks = narrow ? (args.rows + kWarps - 1) / kWarps : args.rows;
  if (blocks > kMaxGrid) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks));
  if (!narrow) return launch(row_unpack_wide_kernel, grid, Policy::kThreads, 0, stream, args);
  const bool aligned = bytes % 16 == 0 && is_aligned(args.out, 16);
  return launch(row_unpack_narrow_kernel, grid, Policy::kThreads, 0, stream, args, aligned);
}

}  // namespace dct::cuda
