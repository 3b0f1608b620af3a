// patch_apply.cu -- validates an untrusted patch and sets the changed entries. Each thread block
// first validates all numbers. Then a warp validates each of its blocks, and sets the entries of
// the block. Positions are distinct, so lanes never write the same weight.
#include "detail/patch_blocks.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

constexpr int kMinBlocks = 4;  // at most 64 registers per thread

__device__ const BlockNumbers* numbers_of(const PatchApplyArgs& args) {
  return reinterpret_cast<const BlockNumbers*>(args.patch + sizeof(PayloadHeader));
}

// Validates the header and the numbers of all blocks. Returns the same status in every thread
// block.
__device__ int32_t numbers_status(const PatchApplyArgs& args) {
  if (args.nbytes < patch_words_offset(args.numel)) return kStatusHeader;
  const auto header = *reinterpret_cast<const PayloadHeader*>(args.patch);
  const int32_t status = patch_header_status(header, args.nbytes, args.numel, args.dtype);
  if (status != 0) return status;
  __shared__ Word warp_sums[kWarps];
  Word words = 0;
  bool ok = true;
  for_each_numbers(numbers_of(args), 0, patch_blocks(args.numel), thread_index(), kThreads,
                   [&](int64_t b, BlockNumbers n) {
                     ok &= block_numbers_ok(n, min(args.numel - b * kPatchBlock, kPatchBlock));
                     words += n.words;
                   });
  constexpr Word kInvalid = Word{1} << 48;  // not the sum of any header
  words = reduce_warps<kWarps>(warp_sum(ok ? words : kInvalid), sum<Word>, warp_sums);
  return words == header.count ? 0 : kStatusNumbers;
}

// Whether the positions ascend strictly within `length` elements, and each code for a full value
// has one. By one warp.
__device__ bool words_ok(const uint16_t* words, BlockNumbers n, int64_t length) {
  bool bad = false;
  uint32_t full = 0;
#pragma unroll 4
  for (uint32_t i = lane_index(); i < n.entries; i += kWarpSize) {
    const uint32_t word = words[i];
    const int below = i > 0 ? words[i - 1] >> 4 : -1, position = static_cast<int>(word >> 4);
    bad |= position <= below || position >= length;
    full += (word & 15) == kFullValue;
  }
  return !__any_sync(kFullWarp, bad) && warp_sum(full) == n.words - n.entries;
}

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

__global__ void __launch_bounds__(kThreads, kMinBlocks)
    patch_apply_kernel(PatchApplyArgs args, PatchGrid grid) {
  const int32_t status = numbers_status(args);
  if (status != 0) {
    if (blockIdx.x == 0 && thread_index() == 0) *args.status = status;
    return;
  }
  const BlockNumbers* numbers = numbers_of(args);
  const auto* words =
      reinterpret_cast<const uint16_t*>(args.patch + patch_words_offset(args.numel)) +
      words_before(numbers, grid);
  const int64_t last = grid.first_of(warp_index() + 1);
  for (int64_t b = grid.first_of(warp_index()); b < last; ++b) {
    const BlockNumbers n = numbers[b];
    const int64_t begin = b * kPatchBlock;
    if (!words_ok(words, n, min(args.numel - begin, kPatchBlock))) {
      if (lane_index() == 0) atomicOr(args.status, kStatusWords);
    } else if (args.weights != nullptr) {
      apply(args.weights + begin, words, n);
    }
    words += n.words;
  }
}

}  // namespace

cudaError_t patch_apply(const PatchApplyArgs& args, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(args.status, 0, sizeof(*args.status), stream);
  if (cleared != cudaSuccess) return cleared;
  const PatchGrid grid(args.numel);
  return launch(patch_apply_kernel, grid.thread_blocks, kThreads, 0, stream, args, grid);
}

}  // namespace dct::cuda
