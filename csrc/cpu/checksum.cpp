#include <algorithm>
#include <vector>

#include "kernels.h"
#include "patch_lanes.h"

namespace dct::cpu {

void checksum(const ChecksumArgs& args, const Parallel& parallel) {
  const int64_t blocks = patch_blocks(args.numel);
  const int64_t tasks = std::min(parallel.threads, blocks);
  std::vector<uint64_t> sums(tasks);
  parallel.run(tasks, [&](int64_t task) {
    const Share span = share(blocks, tasks, task);
    vectorize_patch([&](auto lanes) {
      uint64_t sum = 0;
      for (int64_t b = span.begin; b < span.end; ++b) {
        const int64_t begin = b * kPatchBlock, n = std::min(args.numel - begin, kPatchBlock);
        sum += block_factor(b) * hash_block<decltype(lanes)>(args.weights + begin, n);
      }
      sums[task] = sum;
    });
  });
  uint64_t total = 0;
  for (uint64_t sum : sums) total += sum;
  *args.checksum = static_cast<int64_t>(total);
}

}  // namespace dct::cpu
