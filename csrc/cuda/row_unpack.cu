// row_unpack.cu -- unpacks rows to dense rows.
//
// Part of a warp, a warp or a block builds a row of up to 32 KB in shared memory and writes it
// once. A block clears a wider row in place, then scatters into it while it is still in the cache.
#include "detail/device.cuh"
#include "detail/positions.cuh"
#include "detail/row_elements.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

struct RowUnpackPolicy {
  static constexpr int kLaneBytes = 128;  // of a narrow row: 32 KB of shared memory per 256 lanes
};

// The bytes that a row takes in shared memory.
__host__ __device__ int stage_bytes(int row_bytes) {
  return (row_bytes + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
}

template <int kLanes, typename Out>
__global__ void __launch_bounds__(kRowThreads<kLanes>)
    row_unpack_narrow_kernel(RowUnpackArgs args, PositionFormat format, bool aligned) {
  constexpr int kElementsPerVector = kVectorBytes / sizeof(Out);
  extern __shared__ __align__(16) unsigned char stages[];
  const int group = thread_index() / kLanes, lane = thread_index() % kLanes;
  const int64_t row = int64_t{blockIdx.x} * (kRowThreads<kLanes> / kLanes) + group;
  const bool active = row < args.rows;  // inactive lanes still take part in warp operations
  const int width = static_cast<int>(args.width), k = static_cast<int>(args.k);
  auto* stage = reinterpret_cast<Out*>(stages + group * stage_bytes(width * sizeof(Out)));
#pragma unroll 1
  for (int i = lane * kElementsPerVector; i < width; i += kLanes * kElementsPerVector) {
    *reinterpret_cast<uint4*>(stage + i) = make_uint4(0, 0, 0, 0);
  }
  kLanes > kWarpSize ? __syncthreads() : __syncwarp();

  const int64_t source = active ? row : 0, slots = source * k;
  __shared__ ScanStorage<kLanes> storage;
  for_each_slot<kLanes>(format, args.positions + source * format.bytes, width, k, storage,
                        [&](int slot, int column) {
                          const float x = load_element(args.values, slots + slot, args.value_dtype);
                          if (column >= 0) stage[column] = round_to<Out>(x);
                        });
  kLanes > kWarpSize ? __syncthreads() : __syncwarp();

  if (!active) return;
  auto* out = static_cast<Out*>(args.out) + row * width;
  if (aligned) {
#pragma unroll 1
    for (int i = lane * kElementsPerVector; i < width; i += kLanes * kElementsPerVector) {
      __stcs(reinterpret_cast<uint4*>(out + i), *reinterpret_cast<const uint4*>(stage + i));
    }
  } else {
#pragma unroll 1
    for (int i = lane; i < width; i += kLanes) out[i] = stage[i];
  }
}

__global__ void __launch_bounds__(kThreads)
    row_unpack_wide_kernel(RowUnpackArgs args, PositionFormat format) {
  __shared__ ScanStorage<kThreads> storage;
  const int64_t row = blockIdx.x;
  const int64_t size = itemsize(args.out_dtype);
  auto* out = static_cast<unsigned char*>(args.out) + row * args.width * size;
  for (int64_t i = thread_index(); i < args.width; i += kThreads) {
    store_element(out, i, 0.0f, args.out_dtype);
  }
  __syncthreads();
  for_each_slot<kThreads>(format, args.positions + row * format.bytes, args.width, args.k, storage,
                          [&](int64_t slot, int column) {
                            if (column < 0) return;
                            const float x =
                                load_element(args.values, row * args.k + slot, args.value_dtype);
                            store_element(out, column, x, args.out_dtype);
                          });
}

template <int kLanes, typename Out>
cudaError_t run(const RowUnpackArgs& args, cudaStream_t stream) {
  constexpr int kBlockThreads = kRowThreads<kLanes>, kRows = kBlockThreads / kLanes;
  const int64_t blocks = (args.rows + kRows - 1) / kRows;
  const int bytes = static_cast<int>(args.width * sizeof(Out));
  const bool aligned = bytes % kVectorBytes == 0 && is_aligned(args.out, kVectorBytes);
  return launch(row_unpack_narrow_kernel<kLanes, Out>, blocks, kBlockThreads,
                kRows * stage_bytes(bytes), stream, args, PositionFormat(args.width, args.k),
                aligned);
}

}  // namespace

cudaError_t row_unpack(const RowUnpackArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  return dispatch(args.out_dtype, [&](auto out) {
    using Out = decltype(out);
    const int64_t bytes = args.width * static_cast<int64_t>(sizeof(Out));
    if (bytes <= 8 * RowUnpackPolicy::kLaneBytes) return run<8, Out>(args, stream);
    if (bytes <= 16 * RowUnpackPolicy::kLaneBytes) return run<16, Out>(args, stream);
    if (bytes <= 32 * RowUnpackPolicy::kLaneBytes) return run<32, Out>(args, stream);
    if (bytes <= 64 * RowUnpackPolicy::kLaneBytes) return run<64, Out>(args, stream);
    if (bytes <= 128 * RowUnpackPolicy::kLaneBytes) return run<128, Out>(args, stream);
    if (bytes <= 256 * RowUnpackPolicy::kLaneBytes) return run<256, Out>(args, stream);
    return launch(row_unpack_wide_kernel, args.rows, kThreads, 0, stream, args,
                  PositionFormat(args.width, args.k));
  });
}

}  // namespace dct::cuda
