// The tensor is cut into one chunk of whole blocks per thread. A chunk is packed in one pass over
// memory, strip by strip: a vector loop stores acc where nothing passes and flags what does; the
// few flagged elements then go through scalar code one by one. The first chunk of a range packs
// straight into the payload, the others into scratch, from where finish() moves the packed bytes
// into place once it is known how many entries come before them.

#include "mask_pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "../common/payload.h"
#include "../common/rounding.h"
#include "accumulate.h"
#include "bitmask.h"
#include "simd_dispatch.h"

namespace dct::cpu {
namespace {

constexpr int64_t kStrip = 4096;  // its residual, gradient and flags fit the first-level cache
constexpr int64_t kParallelEntries = 1 << 18;  // fewer are moved sooner than threads are woken

// Chunks that share a segment add to its count at the same time.
void add_saturating(int32_t* total, int64_t n) {
  int32_t old = __atomic_load_n(total, __ATOMIC_RELAXED), sum;
  do {
    sum = static_cast<int32_t>(std::min<int64_t>(old + n, INT32_MAX));
  } while (
      !__atomic_compare_exchange_n(total, &old, sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

// Stores acc where an element stays; leaves alone those that pass, and lists them. Returns how
// many.
template <typename Grad>
int64_t mask_strip(float* residual, const Grad* grad, int64_t n, float inv_scale, float tau,
                   uint16_t* passing) {
  int64_t count = 0;
  vectorize([&count, residual, grad, n, inv_scale, tau, passing] {
    alignas(64) uint8_t flags[kStrip];
    for (int64_t i = 0; i < n; ++i) {
      const float acc = accumulate(residual[i], grad, i, inv_scale);
      const bool passes = !(std::fabs(acc) < tau) & (acc != 0.0f);
      if constexpr (!std::is_same_v<Grad, NoGrad>) residual[i] = passes ? residual[i] : acc;
      flags[i] = passes;
    }
    uint64_t bits[bitmask_words(kStrip)];
    pack_bits(flags, n, bits);
    count = bit_indices(bits, bitmask_words(n), passing);
  });
  return count;
}

// Whole blocks of one range, packed by one task. Entries beyond `room` cannot fit the payload
// whatever comes before them.
template <typename Value>
struct Chunk {
  int64_t range;
  int64_t begin, end;   // elements
  uint32_t* starts;     // the range's, at this chunk's first block; until finish() from 0
  uint16_t* positions;  // of the entries: in the payload or in scratch
  Value* values;
  int64_t room;
  int64_t passed = 0;
  int64_t before = 0;  // what passed in earlier chunks of the range
  bool non_finite = false;

  int64_t stored() const { return std::min(passed, room); }
};

template <typename Grad, typename Value>
class Packer {
 public:
  explicit Packer(const MaskPackArgs& args)
      : args_(args),
        grad_(static_cast<const Grad*>(args.grad)),
        inv_scale_(args.inv_scale != nullptr ? *args.inv_scale : 1.0f),
        layout_(payload_layout(args.numel, args.capacity, args.value_dtype, args.ranges)) {}

  void run(const Parallel& parallel) {
    std::fill_n(args_.seen, args_.num_segments, 0);
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
    int64_t scratch_entries = 0;
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
        chunk.room = std::min(chunk.end - chunk.begin, args_.capacity);
        if (part == 0) {
          chunk.positions = positions(r);
          chunk.values = values(r);
        } else {
          scratch_entries += chunk.room;
        }
        chunks_.push_back(chunk);
      }
    }
    // Not initialized: pages that no entry reaches are never touched.
    scratch_positions_.reset(new uint16_t[scratch_entries]);
    scratch_values_.reset(new Value[scratch_entries]);
    int64_t entry = 0;
    for (Chunk<Value>& chunk : chunks_) {
      if (chunk.positions != nullptr) continue;
      chunk.positions = scratch_positions_.get() + entry;
      chunk.values = scratch_values_.get() + entry;
      entry += chunk.room;
    }
  }

  void pack(Chunk<Value>& chunk) const {
    const int64_t* ends = args_.segments + 1;
    int64_t s = std::upper_bound(ends, ends + args_.num_segments, chunk.begin) - ends;
    uint32_t* start = chunk.starts;
    for (int64_t block = chunk.begin; block < chunk.end; block += kBlock) {
      *start++ = static_cast<uint32_t>(chunk.stored());
      const int64_t block_end = std::min(block + kBlock, chunk.end);
      for (int64_t i = block, end; i < block_end; i = end) {
        while (ends[s] <= i) ++s;
        end = std::min({i + kStrip, ends[s], block_end});
        if (args_.threshold[s] < 0) continue;
        const int64_t before = chunk.passed;
        pack_strip(chunk, block, i, end, args_.threshold[s]);
        add_saturating(args_.seen + s, chunk.passed - before);
      }
    }
  }

  void pack_strip(Chunk<Value>& chunk, int64_t block, int64_t begin, int64_t end, float tau) const {
    uint16_t passing[kStrip + kSpareIndices];
    const Grad* grad = grad_ == nullptr ? nullptr : grad_ + begin;
    const int64_t count =
        mask_strip(args_.residual + begin, grad, end - begin, inv_scale_, tau, passing);
    for (int64_t i = 0; i < count; ++i) pack_entry(chunk, block, begin + passing[i]);
  }

  void pack_entry(Chunk<Value>& chunk, int64_t block, int64_t i) const {
    const float old = args_.residual[i];
    const float acc = accumulate(old, grad_, i, inv_scale_);
    const bool finite = is_finite(acc);
    // An overflowed step must not destroy what the residual held.
    float left = finite ? acc : is_finite(old) ? old : 0.0f;
    if (chunk.passed < chunk.room) {
      const Value value = round_saturating<Value>(acc);
      chunk.positions[chunk.passed] = static_cast<uint16_t>(i - block);
      chunk.values[chunk.passed] = value;
      if (finite) left = acc - to_float(value);
    }
    args_.residual[i] = left;
    chunk.non_finite |= !finite;
    ++chunk.passed;
  }

  void write_headers() {
    const int32_t* status_end = args_.status + args_.num_status;
    const bool damage = std::any_of(args_.status, status_end, [](int32_t s) { return s != 0; });
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
          payload_header(numel, args_.capacity, args_.value_dtype, passed, non_finite, damage);
      std::memcpy(payload(r), &header, sizeof(header));
      starts(r)[num_blocks(numel)] = header.count;
    }
  }

  // Moves a chunk's entries to their place in the payload; those that do not fit go back into the
  // residual: value + residual is acc again, exactly.
  void finish(const Chunk<Value>& chunk) const {
    const int64_t fits = std::clamp<int64_t>(args_.capacity - chunk.before, 0, chunk.stored());
    if (fits > 0 && chunk.positions != positions(chunk.range)) {
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
  std::unique_ptr<uint16_t[]> scratch_positions_;
  std::unique_ptr<Value[]> scratch_values_;
};

}  // namespace

void mask_pack(const MaskPackArgs& args, const Parallel& parallel) {
  dispatch_payload_value(args.value_dtype, [&](auto value) {
    using Value = decltype(value);
    if (args.grad == nullptr) return Packer<NoGrad, Value>(args).run(parallel);
    dispatch(args.grad_dtype,
             [&](auto grad) { Packer<decltype(grad), Value>(args).run(parallel); });
  });
}

}  // namespace dct::cpu
