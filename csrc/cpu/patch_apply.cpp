// Validates each block of an untrusted patch, and then sets its entries. The words of the block are
// in the L1 cache by then. The entries are independent, so the processor loads the weights of many
// at the same time.

#include <algorithm>

#include "../common/patch.h"
#include "kernels.h"
#include "simd_dispatch.h"

namespace dct::cpu {
namespace {

// Whether the positions ascend strictly within `length` elements, and each code for a full value
// has one. Call it inside vectorize().
bool block_words_ok(const uint16_t* words, BlockNumbers numbers, int64_t length) {
  const int64_t entries = numbers.entries;
  if (entries == 0) return true;
  uint16_t descends = 0, full = (words[0] & 15) == kFullValue;
  for (int64_t i = 1; i < entries; ++i) {
    descends |= words[i] >> 4 <= words[i - 1] >> 4;
    full += (words[i] & 15) == kFullValue;
  }
  return descends == 0 && words[entries - 1] >> 4 < length && full == numbers.words - entries;
}

void apply_block(const uint16_t* words, int64_t entries, uint16_t* weights) {
  const uint16_t* value = words + entries;
  for (int64_t i = 0; i < entries; ++i) {
    uint16_t& weight = weights[words[i] >> 4];
    const uint32_t code = words[i] & 15;
    weight = code == kFullValue ? *value++ : add_step(weight, code);
  }
}

}  // namespace

void patch_apply(const PatchApplyArgs& args, const Parallel& parallel) {
  const int64_t at = patch_words_offset(args.numel);
  *args.status = kStatusHeader;
  if (args.nbytes < at) return;
  const auto& header = *reinterpret_cast<const PayloadHeader*>(args.patch);
  *args.status = patch_header_status(header, args.nbytes, args.numel, args.dtype);
  if (*args.status != 0) return;

  const auto* numbers = reinterpret_cast<const BlockNumbers*>(args.patch + sizeof(header));
  const int64_t blocks = patch_blocks(args.numel), tasks = std::min(parallel.threads, blocks);
  const auto length = [&](int64_t b) {
    return std::min(args.numel - b * kPatchBlock, kPatchBlock);
  };
  int64_t count = 0;
  bool ok = true;
  for (int64_t b = 0; b < blocks; ++b) {
    ok &= block_numbers_ok(numbers[b], length(b));
    count += numbers[b].words;
  }
  if (!ok || count != header.count) {
    *args.status = kStatusNumbers;
    return;
  }

  parallel.run(tasks, [&](int64_t task) {
    const Share span = share(blocks, tasks, task);
    vectorize([&] {
      const auto* words = reinterpret_cast<const uint16_t*>(args.patch + at);
      for (int64_t b = 0; b < span.begin; ++b) words += numbers[b].words;
      for (int64_t b = span.begin; b < span.end; words += numbers[b++].words) {
        if (!block_words_ok(words, numbers[b], length(b))) {
          __atomic_fetch_or(args.status, kStatusWords, __ATOMIC_RELAXED);
        } else if (args.weights != nullptr) {
          apply_block(words, numbers[b].entries, args.weights + b * kPatchBlock);
        }
      }
    });
  });
}

}  // namespace dct::cpu
