// row_gather.cu -- gathers the values of each row at given positions. A warp processes a narrow
// row, and a block processes a wide row.
#include "detail/device.cuh"
#include "detail/positions.cuh"
#include "detail/row_elements.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

struct RowGatherPolicy {
  static constexpr int64_t kMaxWarpWidth = 4096;  // a bitmap of 16 bytes per lane
};

// One row per group of kGroup threads.
template <int kGroup>
__global__ void __launch_bounds__(kThreads)
    row_gather_kernel(RowGatherArgs args, PositionFormat format) {
  __shared__ ScanStorage<kGroup> storage;
  constexpr int kRows = kThreads / kGroup;
  const int64_t row = int64_t{blockIdx.x} * kRows + thread_index() / kGroup;
  if (row >= args.rows) return;
  const uint8_t* positions = args.positions + row * format.bytes;
  for_each_slot<kGroup>(
      format, positions, args.width, args.k, storage, [&](int64_t slot, int column) {
        const float x =
            column < 0 ? 0.0f : load_element(args.x, row * args.width + column, args.x_dtype);
        store_element(args.values, row * args.k + slot, x, args.value_dtype);
      });
}

template <int kGroup>
cudaError_t run(const RowGatherArgs& args, cudaStream_t stream) {
  constexpr int kRows = kThreads / kGroup;
  const int64_t blocks = (args.rows + kRows - 1) / kRows;
  return launch(row_gather_kernel<kGroup>, blocks, kThreads, 0, stream, args,
                PositionFormat(args.width, args.k));
}

}  // namespace

cudaError_t row_gather(const RowGatherArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  return args.width <= RowGatherPolicy::kMaxWarpWidth ? run<kWarpSize>(args, stream)
                                                      : run<kThreads>(args, stream);
}

}  // namespace dct::cuda
