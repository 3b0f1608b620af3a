// patch_check.cu -- validates a patch without the weights. A warp validates consecutive blocks.
#include "detail/patch_reader.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

__global__ void __launch_bounds__(kThreads, kReaderMinBlocks)
    patch_check_kernel(PatchCheckArgs args, PatchGrid grid) {
  read_patch(args, grid, [](int64_t, const uint16_t*, BlockNumbers) {});
}

}  // namespace

cudaError_t patch_check(const PatchCheckArgs& args, cudaStream_t stream) {
  return launch_reader(patch_check_kernel, args, stream);
}

}  // namespace dct::cuda
