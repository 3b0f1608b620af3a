// Validates each block, and then sets its entries. The words of the block are in the L1 cache by
// then. The entries are independent, so the processor loads the weights of many at the same time.

#include "kernels.h"
#include "patch_reader.h"

namespace dct::cpu {

void patch_apply(const PatchApplyArgs& args, const Parallel& parallel) {
  read_patch(args, parallel, [&](const PatchBlock& block) {
    uint16_t* weights = args.weights + block.begin;
    const uint16_t* value = block.words + block.entries;
    for (int64_t i = 0; i < block.entries; ++i) {
      uint16_t& weight = weights[block.words[i] >> 4];
      const uint32_t code = block.words[i] & 15;
      weight = code == kFullValue ? *value++ : add_step(weight, code);
    }
  });
}

}  // namespace dct::cpu
