// The tensor is split into chunks of whole blocks, about one per thread. A chunk is packed in one
// pass over memory, strip by strip. A vector loop flags the entries that pass the threshold, and
// stores acc for the other entries. Scalar code then packs the few flagged entries one by one. The
// first chunk of a range is packed directly into the payload. The other chunks are packed into
// scratch memory. finish() moves their entries into place once the preceding entries are counted.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "../common/floats.h"
#include "../common/payload.h"
#include "accumulate.h"
#include "bitmask.h"
#include "kernels.h"
#include "simd_dispatch.h"

namespace dct::cpu {
namespace {

// Elements. The residual, the flags and a 16-bit gradient of a strip fit an L1 cache of 32 KB.
constexpr int64_t kStrip = 4096;
constexpr int64_t kParallelEntries = 1 << 18;  // up to this number, one thread is faster
static_assert(kBlock % kStrip == 0, "a strip is in one block");

// Stores acc for the entries that do not pass. Leaves the entries that pass unchanged, lists them
// in `passing` and returns their number.
template <typename Grad>
int64_t mask_strip(float* residual, const Grad* grad, int64_t n, float inv_scale, float threshold,
                   uint16_t* passing) {
  int64_t count = 0;
  vectorize([&count, residual, grad, n, inv_scale, threshold, passing] {
    alignas(64) uint8_t flags[kStrip];
    for (int64_t i = 0; i < n; ++i) {
      const float acc = accumulate(residual[i], grad, i, inv_scale);
      const bool passes = !(std::fabs(acc) < threshold) & (acc != 0.0f);
      residual[i] = passes ? residual[i] : acc;
      flags[i] = passes;
    }
    uint64_t bits[bitmask_words(kStrip)];
    pack_bits(flags, n, bits);
    count = bit_indices(bits, bitmask_words(n), passing);
  });
  return count;
}

// Whole blocks of one range, packed by one task. Entries beyond `capacity` cannot fit the payload,
// even if the chunk is the first of its range.
template <typename Value>
struct Chunk {
  int64_t range;
  int64_t begin, end;   // elements
  uint32_t* starts;     // of this chunk's blocks; relative to the chunk until finish()
  uint16_t* positions;  // of the entries, in the payload or in scratch memory
  Value* values;
  int64_t capacity;
  std::unique_ptr<uint16_t[]> scratch_positions;
  std::unique_ptr<Value[]> scratch_values;
  int64_t passed = 0;
  int64_t before = 0;  // entries that passed in earlier chunks of the range
  bool non_finite = false;

  int64_t stored() const { return std::min(passed, capacity); }
};

template <typename Grad, typename Value>
class Packer {
 public:
  explicit Packer(const MaskPackArgs& args)
      : args_(args),
        grad_(static_cast<const Grad*>(args.grad)),
        inv_scale_(load_scale(args.inv_scale)),
        layout_(payload_layout(args.numel, args.capacity, args.value_dtype, args.ranges)) {}

  void run(const Parallel& parallel) {
    plan(parallel.threads);
    const int64_t tasks = static_cast<int64_t>(chunks_.size());
    parallel.run(tasks, [this](int64_t task) { pack(chunks_[task]); });
    write_headers();
    int64_t entries = 0;
    for (const Chunk<Value>& chunk : chunks_) entries += chunk.stored();
    if (entries > kParallelEntries) {
      parallel.run(tasks, [this](int64_t task) { finish(chunks_[task]); });
    } else {
      for (const Chunk<Value>& chunk : chunks_) finish(chunk);
    }
  }

 private:
  uint8_t* payload(int64_t range) const { return args_.payload + range * layout_.nbytes; }
  uint32_t* starts(int64_t range) const {
    return reinterpret_cast<uint32_t*>(payload(range) + layout_.starts);
  }
  uint16_t* positions(int64_t range) const {
    return reinterpret_cast<uint16_t*>(payload(range) + layout_.positions);
  }
  Value* values(int64_t range) const {
    return reinterpret_cast<Value*>(payload(range) + layout_.values);
  }

  void plan(int64_t threads) {
    const int64_t tasks_per_range = ceil_div(threads, args_.ranges);
    for (int64_t r = 0; r < args_.ranges; ++r) {
      const Range range = range_bounds(args_.numel, args_.ranges, r);
      const int64_t blocks = num_blocks(range.end - range.begin);
      const int64_t parts = std::min(tasks_per_range, blocks);
      for (int64_t part = 0; part < parts; ++part) {
        const Share span = share(blocks, parts, part);
        Chunk<Value> chunk{};
        chunk.range = r;
        chunk.begin = range.begin + span.begin * kBlock;
        chunk.end = std::min(range.begin + span.end * kBlock, range.end);
        chunk.starts = starts(r) + span.begin;
        chunk.positions = positions(r);
        chunk.values = values(r);
        chunk.capacity = std::min(chunk.end - chunk.begin, args_.capacity);
        if (part > 0) {
          // Uninitialized, so pages that hold no entry are never touched.
          chunk.scratch_positions.reset(new uint16_t[chunk.capacity]);
          chunk.scratch_values.reset(new Value[chunk.capacity]);
          chunk.positions = chunk.scratch_positions.get();
          chunk.values = chunk.scratch_values.get();
        }
        chunks_.push_back(std::move(chunk));
      }
    }
  }

  void pack(Chunk<Value>& chunk) const {
    const float threshold = args_.threshold[chunk.range];
    uint32_t* start = chunk.starts;
    uint16_t passing[kStrip + kSpareIndices];
    for (int64_t begin = chunk.begin; begin < chunk.end; begin += kStrip) {
      if (begin % kBlock == 0) *start++ = static_cast<uint32_t>(chunk.stored());
      const int64_t n = std::min(kStrip, chunk.end - begin);
      const int64_t count =
          mask_strip(args_.residual + begin, grad_ + begin, n, inv_scale_, threshold, passing);
      for (int64_t i = 0; i < count; ++i) pack_entry(chunk, begin + passing[i]);
    }
  }

  void pack_entry(Chunk<Value>& chunk, int64_t i) const {
    const float old = args_.residual[i];
    const float acc = accumulate(old, grad_, i, inv_scale_);
    const bool finite = is_finite(acc);
    // A non-finite sum must not destroy the residual.
    float left = finite ? acc : finite_or_zero(old);
    if (chunk.passed < chunk.capacity) {
      const Value value = round_saturating<Value>(acc);
      chunk.positions[chunk.passed] = static_cast<uint16_t>(i % kBlock);
      chunk.values[chunk.passed] = value;
      if (finite) left = acc - to_float(value);
    }
    args_.residual[i] = left;
    chunk.non_finite |= !finite;
    ++chunk.passed;
  }

  void write_headers() {
    auto chunk = chunks_.begin();
    for (int64_t r = 0; r < args_.ranges; ++r) {
      const Range range = range_bounds(args_.numel, args_.ranges, r);
      int64_t passed = 0;
      bool non_finite = false;
      for (; chunk != chunks_.end() && chunk->range == r; ++chunk) {
        chunk->before = passed;
        passed += chunk->passed;
        non_finite |= chunk->non_finite;
      }
      const int64_t numel = range.end - range.begin;
      const PayloadHeader header =
          payload_header(numel, args_.capacity, args_.value_dtype, passed, non_finite);
      std::memcpy(payload(r), &header, sizeof(header));
      starts(r)[num_blocks(numel)] = header.count;
      args_.seen[r] = static_cast<int32_t>(std::min<int64_t>(passed, INT32_MAX));
    }
  }

  // Moves the entries of a chunk to their place in the payload. If an entry does not fit, adds its
  // value back to the residual, which restores acc exactly.
  void finish(const Chunk<Value>& chunk) const {
    const int64_t fits = std::clamp<int64_t>(args_.capacity - chunk.before, 0, chunk.stored());
    if (fits > 0 && chunk.scratch_positions != nullptr) {
      std::memcpy(positions(chunk.range) + chunk.before, chunk.positions, fits * sizeof(uint16_t));
      std::memcpy(values(chunk.range) + chunk.before, chunk.values, fits * sizeof(Value));
    }
    const int64_t blocks = num_blocks(chunk.end - chunk.begin);
    for (int64_t b = 0, entry = fits; b < blocks; ++b) {
      const int64_t block_end = b + 1 < blocks ? chunk.starts[b + 1] : chunk.stored();
      for (; entry < block_end; ++entry) {
        const float value = to_float(chunk.values[entry]);
        float& residual = args_.residual[chunk.begin + b * kBlock + chunk.positions[entry]];
        if (is_finite(value)) residual = value + residual;
      }
      chunk.starts[b] =
          static_cast<uint32_t>(std::min(chunk.before + chunk.starts[b], args_.capacity));
    }
  }

  MaskPackArgs args_;
  const Grad* grad_;
  float inv_scale_;
  PayloadLayout layout_;
  std::vector<Chunk<Value>> chunks_;
};

}  // namespace

void mask_pack(const MaskPackArgs& args, const Parallel& parallel) {
  dispatch_payload_value(args.value_dtype, [&](auto value) {
    dispatch(args.grad_dtype,
             [&](auto grad) { Packer<decltype(grad), decltype(value)>(args).run(parallel); });
  });
}

}  // namespace dct::cpu
