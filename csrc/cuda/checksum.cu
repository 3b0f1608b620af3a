// checksum.cu -- a thread block hashes one block of 4,096 entries, and adds the sum to the result.
#include "detail/patch_blocks.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) checksum_kernel(ChecksumArgs args, bool aligned) {
  __shared__ Word warp_sums[kWarps];
  const int64_t block = blockIdx.x, begin = block * kPatchBlock;
  const int offset = warp_index() * kHalves * kWarpEntries + lane_index() * kEight;
  Eight bits[kHalves];
  const auto load_all = [&](auto whole) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int64_t index = begin + offset + h * kWarpEntries;
      load_eight<BFloat16, decltype(whole)::value>(args.weights, index, args.numel, bits[h]);
    }
  };
  if (aligned && begin + kPatchBlock <= args.numel) {
    load_all(std::true_type{});
  } else {
    load_all(std::false_type{});
  }
  Word hashes = 0;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int position = offset + h * kWarpEntries;
    hashes += hash_eight(bits[h], position, args.numel - begin - position);
  }
  add_hashes(hashes, block, args.checksum, warp_sums);
}

}  // namespace

cudaError_t checksum(const ChecksumArgs& args, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(args.checksum, 0, sizeof(*args.checksum), stream);
  const int64_t blocks = patch_blocks(args.numel);
  if (cleared != cudaSuccess || blocks == 0) return cleared;
  return launch(checksum_kernel, blocks, kThreads, 0, stream, args,
                is_aligned(args.weights, kVectorBytes));
}

}  // namespace dct::cuda
