#pragma once

// Validates a patch, for patch_check and patch_apply. The bytes are not trusted.

#include "patch_blocks.cuh"

namespace dct::cuda {

constexpr int kReaderMinBlocks = 4;  // at most 64 registers per thread

// Validates the header and the numbers of all blocks. Returns the same status in every thread
// block.
template <typename Args>
__device__ int32_t numbers_status(const Args& args) {
  if (args.nbytes < patch_words_offset(args.numel)) return kStatusHeader;
  const auto header = *reinterpret_cast<const PayloadHeader*>(args.patch);
  const int32_t status = patch_header_status(header, args.nbytes, args.numel, args.dtype);
  if (status != 0) return status;
  __shared__ Word warp_sums[kWarps];
  Word sum = 0;
  bool ok = true;
  const auto* numbers = reinterpret_cast<const BlockNumbers*>(args.patch + sizeof(header));
  for_each_numbers(numbers, 0, patch_blocks(args.numel), thread_index(), kThreads,
                   [&](int64_t b, BlockNumbers n) {
                     ok &= block_numbers_ok(n, min(args.numel - b * kPatchBlock, kPatchBlock));
                     sum += n.words;
                   });
  constexpr Word kInvalid = Word{1} << 48;  // not the sum of any header
  sum = warp_sum(ok ? sum : kInvalid);
  if (lane_index() == 0) warp_sums[warp_index()] = sum;
  __syncthreads();
  sum = 0;
  for (Word each : warp_sums) sum += each;
  return sum == header.count ? 0 : kStatusNumbers;
}

// Whether the positions ascend strictly within `length` elements, and each code for a full value
// has one. By one warp.
__device__ inline bool words_ok(const uint16_t* words, BlockNumbers n, int64_t length) {
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

// Sets the status, and calls visit(first element, words, numbers) for every valid block of a patch
// that is not ignored. By all threads of the grid.
template <typename Args, typename Visit>
__device__ void read_patch(const Args& args, const PatchGrid& grid, Visit visit) {
  const int32_t status = numbers_status(args);
  if (status != 0) {
    if (blockIdx.x == 0 && thread_index() == 0) *args.status = status;
    return;
  }
  __shared__ Word warp_sums[kWarps];
  const auto* numbers = reinterpret_cast<const BlockNumbers*>(args.patch + sizeof(PayloadHeader));
  const auto* words =
      reinterpret_cast<const uint16_t*>(args.patch + patch_words_offset(args.numel)) +
      words_before(numbers, grid, warp_sums);
  const int64_t last = grid.first_of(warp_index() + 1);
  for (int64_t b = grid.first_of(warp_index()); b < last; ++b) {
    const BlockNumbers n = numbers[b];
    const int64_t begin = b * kPatchBlock;
    if (words_ok(words, n, min(args.numel - begin, kPatchBlock))) {
      visit(begin, words, n);
    } else if (lane_index() == 0) {
      atomicOr(args.status, kStatusWords);
    }
    words += n.words;
  }
}

// Clears the status and launches a kernel that calls read_patch.
template <typename Args>
cudaError_t launch_reader(void (*kernel)(Args, PatchGrid), const Args& args, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(args.status, 0, sizeof(*args.status), stream);
  if (cleared != cudaSuccess) return cleared;
  const PatchGrid grid(args.numel);
  return launch(kernel, grid.thread_blocks, kThreads, 0, stream, args, grid);
}

}  // namespace dct::cuda
