// Output is built block by block: a block's sum in a buffer, rank after rank, then out written
// once. Payloads are not trusted: a block of a payload is validated before any of it is added.

#include "scatter_unpack.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "../common/payload.h"
#include "../common/rounding.h"
#include "stream_copy.h"
#include "vectorise.h"

namespace dct::cpu {
namespace {

constexpr int64_t kTile = 2048;  // elements on their way there

template <typename Value, typename Out>
class Unpacker {
 public:
  explicit Unpacker(const ScatterUnpackArgs& args)
      : args_(args),
        out_(static_cast<Out*>(args.out)),
        factor_(args.out_scale != nullptr ? args.scale * *args.out_scale : args.scale),
        layout_(payload_layout(args.numel, args.capacity, args.value_dtype, args.ranges)),
        range_blocks_(range_blocks(args.numel, args.ranges)),
        header_ok_(args.ranks * args.ranges) {}

  void run(const Parallel& parallel) {
    check_headers();
    const int64_t blocks = num_blocks(args_.numel);
    const int64_t tasks = std::min(parallel.threads, blocks);
    parallel.run(tasks, [&](int64_t task) {
      const Share mine = share(blocks, tasks, task);
      alignas(64) float sum[kBlock];
      for (int64_t block = mine.begin; block < mine.end; ++block) unpack(block, sum);
    });
  }

 private:
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
          args_.status[p] |= kStatusStarts;  // no block of its own would notice
        }
      }
    }
  }

  void unpack(int64_t block, float* sum) const {
    const int64_t range = block / range_blocks_;
    const int64_t begin = block * kBlock;
    const int64_t length = std::min(kBlock, args_.numel - begin);
    std::fill_n(sum, length, 0.0f);
    for (int64_t p = 0; p < args_.ranks; ++p) {
      if (!header_ok_[p * args_.ranges + range]) continue;
      const int32_t status = add(payload(p, range), block - range * range_blocks_, length, sum);
      if (status != 0) __atomic_fetch_or(args_.status + p, status, __ATOMIC_RELAXED);
    }
    write(begin, length, sum);
  }

  // Adds block `block` of one payload to `sum`, or nothing and returns what is wrong with it.
  int32_t add(const uint8_t* payload, int64_t block, int64_t length, float* sum) const {
    const PayloadHeader& head = header(payload);
    if (block == 0 && lost_non_finite(head)) {
      // The non-finite entry may be one that did not fit: the receiver must see it all the same.
      sum[0] = std::numeric_limits<float>::quiet_NaN();
    }
    const int64_t first = starts(payload)[block], end = starts(payload)[block + 1];
    const bool last_block = block + 1 == num_blocks(static_cast<int64_t>(head.numel));
    if (first > end || end > head.count || (block == 0 && first != 0) ||
        (last_block && end != head.count)) {
      return kStatusStarts;
    }
    const int64_t entries = end - first;
    const auto* positions = reinterpret_cast<const uint16_t*>(payload + layout_.positions) + first;
    const auto* values = reinterpret_cast<const Value*>(payload + layout_.values) + first;
    if (!ascending(positions, entries, length)) return kStatusPositions;
    for (int64_t i = 0; i < entries; ++i) sum[positions[i]] += to_float(values[i]);
    return 0;
  }

  static bool ascending(const uint16_t* positions, int64_t entries, int64_t length) {
    if (entries == 0) return true;
    // More entries than elements cannot ascend: refused unread, so no payload costs more than its
    // share of time.
    if (entries > length || positions[entries - 1] >= length) return false;
    bool descends = false;
    vectorise([&] {
      uint16_t any = 0;
      for (int64_t i = 1; i < entries; ++i) any |= positions[i] <= positions[i - 1];
      descends = any != 0;
    });
    return !descends;
  }

  void write(int64_t begin, int64_t length, const float* sum) const {
    Out* out = out_ + begin;
    if (args_.accumulate) {
      convert<true>(sum, out, length, out);
    } else if (args_.numel * static_cast<int64_t>(sizeof(Out)) < kStreamBytes) {
      convert<false>(sum, nullptr, length, out);
    } else {
      for (int64_t offset = 0; offset < length; offset += kTile) {
        const int64_t n = std::min(kTile, length - offset);
        Out tile[kTile];
        convert<false>(sum + offset, nullptr, n, tile);
        stream_copy(out + offset, tile, n * sizeof(Out));
      }
    }
  }

  template <bool accumulate>
  void convert(const float* sum, const Out* base, int64_t n, Out* out) const {
    vectorise([=, factor = factor_] {
      for (int64_t i = 0; i < n; ++i) {
        float start = 0.0f;
        if constexpr (accumulate) start = to_float(base[i]);
        out[i] = round_to<Out>(start + factor * sum[i]);
      }
    });
  }

  ScatterUnpackArgs args_;
  Out* out_;
  float factor_;
  PayloadLayout layout_;
  int64_t range_blocks_;
  std::vector<uint8_t> header_ok_;
};

}  // namespace

void scatter_unpack(const ScatterUnpackArgs& args, const Parallel& parallel) {
  dispatch_payload_value(args.value_dtype, [&](auto value) {
    dispatch(args.out_dtype,
             [&](auto out) { Unpacker<decltype(value), decltype(out)>(args).run(parallel); });
  });
}

}  // namespace dct::cpu
