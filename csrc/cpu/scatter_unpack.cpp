// The output is built tile by tile. A buffer accumulates the sum of a tile, rank by rank, and then
// the tile is written once. Payloads are not trusted: a block of a payload is validated before any
// entry is added.
//
// Stores wait for memory: non-temporal stores for a write buffer, other stores for their cache
// line. So the output is prefetched and written in slices. After each rank is added to a tile, a
// slice of the tile's output is prefetched for later stores, and a slice of the previous tile is
// written. Non-temporal stores need no prefetch.

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "../common/floats.h"
#include "../common/payload.h"
#include "kernels.h"
#include "simd_dispatch.h"
#include "streaming.h"

namespace dct::cpu {
namespace {

constexpr int64_t kTile = 4096;  // elements: the sums of two tiles fit the L1 cache
constexpr int64_t kPiece = 32;   // elements; g++ unrolls loops of 16 instead of vectorizing them
static_assert(kBlock % kTile == 0, "a tile is in one block");

template <typename Value, typename Out>
class Unpacker {
 public:
  explicit Unpacker(const ScatterUnpackArgs& args)
      : args_(args),
        out_(static_cast<Out*>(args.out)),
        factor_(args.out_scale != nullptr ? args.scale * *args.out_scale : args.scale),
        layout_(payload_layout(args.numel, args.capacity, args.value_dtype, args.ranges)),
        range_blocks_(range_blocks(args.numel, args.ranges)),
        header_ok_(args.ranks * args.ranges),
        streams_(args.numel * kOutSize >= kStreamBytes),
        turns_(std::max<int64_t>(args.ranks, 1)),
        slice_(ceil_div(kTile, turns_ * kPiece) * kPiece) {}

  void run(const Parallel& parallel) {
    check_headers();
    const int64_t blocks = num_blocks(args_.numel);
    const int64_t tasks = std::min(parallel.threads, blocks);
    // Padded to avoid false sharing, also of adjacent cache lines.
    const int64_t stride = turns_ + ceil_div(128, sizeof(Entries));
    std::vector<Entries> entries(tasks * stride);
    parallel.run(tasks, [&](int64_t task) {
      unpack(share(blocks, tasks, task), entries.data() + task * stride);
    });
  }

 private:
  static constexpr int64_t kOutSize = sizeof(Out);

  // The entries of one rank in a block that are not yet added.
  struct Entries {
    const uint16_t *position, *end;
    const Value* value;
    bool lost_non_finite;
  };
  struct Tile {
    float* sum;  // all zeros before entries are added and after the tile is written
    int64_t begin, length;
  };

  const uint8_t* payload(int64_t rank, int64_t range) const {
    return args_.payloads + (rank * args_.ranges + range) * layout_.nbytes;
  }
  const PayloadHeader& header(const uint8_t* payload) const {
    return *reinterpret_cast<const PayloadHeader*>(payload);
  }
  const uint32_t* starts(const uint8_t* payload) const {
    return reinterpret_cast<const uint32_t*>(payload + layout_.starts);
  }

  void check_headers() {
    for (int64_t p = 0; p < args_.ranks; ++p) {
      args_.status[p] = 0;
      for (int64_t r = 0; r < args_.ranges; ++r) {
        const Range range = range_bounds(args_.numel, args_.ranges, r);
        const int64_t numel = range.end - range.begin;
        const bool ok = header_ok(header(payload(p, r)), numel, args_.capacity, args_.value_dtype);
        header_ok_[p * args_.ranges + r] = ok;
        if (!ok) {
          args_.status[p] |= kStatusHeader;
        } else if (numel == 0 && starts(payload(p, r))[0] != 0) {
          args_.status[p] |= kStatusStarts;  // an empty range has no block that checks this
        }
      }
    }
  }

  void unpack(const Share& blocks, Entries* entries) const {
    alignas(64) float sums[2][kTile] = {};
    Tile tile{sums[0], 0, 0}, before{sums[1], 0, 0};
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      const int64_t begin = block * kBlock, end = std::min(begin + kBlock, args_.numel);
      for (int64_t p = 0; p < args_.ranks; ++p) entries[p] = entries_of(p, block, end - begin);
      for (int64_t first = begin; first < end; first += kTile) {
        tile = {tile.sum, first, std::min(kTile, end - first)};
        for (int64_t p = 0; p < turns_; ++p) {
          add(entries[p], first - begin, tile);
          if (!streams_) fetch_slice(tile, p);
          write_slice(before, p);
        }
        std::swap(tile, before);
      }
    }
    for (int64_t p = 0; p < turns_; ++p) write_slice(before, p);
    stream_end();
  }

  // Returns no entries if the header or this block is invalid. The rank's status reports the error.
  Entries entries_of(int64_t rank, int64_t block, int64_t length) const {
    const int64_t range = block / range_blocks_;
    if (!header_ok_[rank * args_.ranges + range]) return {};
    block -= range * range_blocks_;
    const uint8_t* from = payload(rank, range);
    const PayloadHeader& head = header(from);
    const bool lost = block == 0 && lost_non_finite(head);
    const int64_t first = starts(from)[block], end = starts(from)[block + 1];
    const bool last_block = block + 1 == num_blocks(static_cast<int64_t>(head.numel));
    int32_t status = kStatusStarts;
    if (first <= end && end <= head.count && (block != 0 || first == 0) &&
        (!last_block || end == head.count)) {
      const auto* positions = reinterpret_cast<const uint16_t*>(from + layout_.positions) + first;
      const auto* values = reinterpret_cast<const Value*>(from + layout_.values) + first;
      if (ascending(positions, end - first, length)) {
        return {positions, positions + (end - first), values, lost};
      }
      status = kStatusPositions;
    }
    __atomic_fetch_or(args_.status + rank, status, __ATOMIC_RELAXED);
    return {nullptr, nullptr, nullptr, lost};
  }

  // Adds the entries that lie in `tile`, which begins at position `first` of its block.
  void add(Entries& entries, int64_t first, const Tile& tile) const {
    if (entries.lost_non_finite) {
      // The non-finite entry may not have fit into the payload. The receiver must still get a NaN.
      tile.sum[0] = std::numeric_limits<float>::quiet_NaN();
      entries.lost_non_finite = false;
    }
    const uint16_t *position = entries.position, *const end = entries.end;
    const Value* value = entries.value;
    for (; position < end && *position < first + tile.length; ++position, ++value) {
      tile.sum[*position - first] += to_float(*value);
    }
    entries.position = position;
    entries.value = value;
  }

  static bool ascending(const uint16_t* positions, int64_t entries, int64_t length) {
    if (entries == 0) return true;
    // More entries than elements cannot ascend. They are rejected unread, so an invalid payload
    // takes no longer than a valid one.
    if (entries > length || positions[entries - 1] >= length) return false;
    bool descends = false;
    vectorize([&] {
      uint16_t any = 0;
      for (int64_t i = 1; i < entries; ++i) any |= positions[i] <= positions[i - 1];
      descends = any != 0;
    });
    return !descends;
  }

  // Prefetches the output of a slice for writing.
  void fetch_slice(const Tile& tile, int64_t index) const {
    const int64_t begin = index * slice_, end = std::min(begin + slice_, tile.length);
    const Out* out = out_ + tile.begin;
    for (int64_t i = begin; i < end; i += 64 / kOutSize) __builtin_prefetch(out + i, 1);
  }

  // Writes the `index`-th slice of a tile, and clears its sums.
  void write_slice(const Tile& tile, int64_t index) const {
    const int64_t begin = index * slice_, end = std::min(begin + slice_, tile.length);
    if (begin >= end) return;
    float* sum = tile.sum + begin;
    Out* out = out_ + tile.begin + begin;
    if (streams_) return stream(sum, end - begin, out);
    convert(sum, end - begin, out);
    std::fill_n(sum, end - begin, 0.0f);
  }

  void convert(const float* sum, int64_t n, Out* out) const {
    vectorize([=, factor = factor_] {
      for (int64_t i = 0; i < n; ++i) out[i] = round_to<Out>(0.0f + factor * sum[i]);
    });
  }

  void stream(float* sum, int64_t n, Out* out) const {
    const int64_t misaligned = (-reinterpret_cast<intptr_t>(out) & 15) / kOutSize;
    vectorize([=, factor = factor_] {
      const auto plain = [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) out[i] = round_to<Out>(0.0f + factor * sum[i]);
        std::fill(sum + begin, sum + end, 0.0f);
      };
      int64_t i = std::min(misaligned, n);
      plain(0, i);
      for (; i + kPiece <= n; i += kPiece) {
        alignas(64) Out piece[kPiece];
        for (int64_t j = 0; j < kPiece; ++j) piece[j] = round_to<Out>(0.0f + factor * sum[i + j]);
        stream_aligned(out + i, piece, sizeof(piece));
        std::fill_n(sum + i, kPiece, 0.0f);
      }
      plain(i, n);
    });
  }

  ScatterUnpackArgs args_;
  Out* out_;
  float factor_;
  PayloadLayout layout_;
  int64_t range_blocks_;
  std::vector<uint8_t> header_ok_;
  bool streams_;
  int64_t turns_;  // turns per tile, one per rank; a turn writes a slice of the previous tile
  int64_t slice_;  // elements
};

}  // namespace

void scatter_unpack(const ScatterUnpackArgs& args, const Parallel& parallel) {
  dispatch_payload_value(args.value_dtype, [&](auto value) {
    dispatch(args.out_dtype,
             [&](auto out) { Unpacker<decltype(value), decltype(out)>(args).run(parallel); });
  });
}

}  // namespace dct::cpu
