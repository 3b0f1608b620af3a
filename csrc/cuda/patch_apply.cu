// patch_apply.cu -- sets the changed entries. A warp validates each of its blocks, and then sets
// the entries of the block. Positions are distinct, so lanes never write the same weight.
#include "detail/patch_reader.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

// Sets the entries of one block. By one warp.
__device__ void apply(uint16_t* weights, const uint16_t* words, BlockNumbers n) {
  const uint32_t below = (1u << lane_index()) - 1;
  uint32_t value = n.entries;
#pragma unroll 4
  for (uint32_t first = 0; first < n.entries; first += kWarpSize) {
    const uint32_t i = first + lane_index();
    const uint32_t word = i < n.entries ? words[i] : 0;
    const bool full = i < n.entries && (word & 15) == kFullValue;
    const unsigned lanes = __ballot_sync(kFullWarp, full);
    if (i < n.entries) {
      uint16_t& weight = weights[word >> 4];
      weight = full ? words[value + __popc(lanes & below)] : add_step(weight, word & 15);
    }
    value += __popc(lanes);
  }
}

__global__ void __launch_bounds__(kThreads, kReaderMinBlocks)
    patch_apply_kernel(PatchApplyArgs args, PatchGrid grid) {
  read_patch(args, grid, [&](int64_t begin, const uint16_t* words, BlockNumbers n) {
    apply(args.weights + begin, words, n);
  });
}

}  // namespace

cudaError_t patch_apply(const PatchApplyArgs& args, cudaStream_t stream) {
  return launch_reader(patch_apply_kernel, args, stream);
}

}  // namespace dct::cuda
