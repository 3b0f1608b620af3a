#include "kernels.h"
#include "patch_reader.h"

namespace dct::cpu {

void patch_check(const PatchCheckArgs& args, const Parallel& parallel) {
  read_patch(args, parallel, [](const PatchBlock&) {});
}

}  // namespace dct::cpu
