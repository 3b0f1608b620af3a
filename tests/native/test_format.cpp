// Layout, ranges, picks and encodings against their definitions.

#include "../../csrc/common/hash.h"
#include "../../csrc/common/payload.h"
#include "../../csrc/common/row_layout.h"
#include "support.h"

using namespace dct;

namespace {

void layout_is_as_documented() {
  const PayloadLayout layout = payload_layout(1'000'000, 6250, DType::kBFloat16, 1);
  CHECK(layout.starts == 64 && layout.positions == 320 && layout.values == 12832 &&
            layout.nbytes == 25344,
        "%ld %ld %ld %ld", long(layout.starts), long(layout.positions), long(layout.values),
        long(layout.nbytes));
  for (int64_t numel : {0, 1, 100, 16383, 16384, 16385, 32768, 1 << 20}) {
    for (int64_t ranges : {1, 2, 3, 7, 100}) {
      for (int64_t capacity : {1, 7, 8, 1000}) {
        const PayloadLayout l = payload_layout(numel, capacity, DType::kFloat32, ranges);
        const int64_t blocks = (numel + 16383) / 16384, each = (blocks + ranges - 1) / ranges;
        CHECK(l.positions % 16 == 0 && l.values % 16 == 0 && l.nbytes % 16 == 0, "alignment");
        CHECK(l.positions - (64 + 4 * (each + 1)) < 16 && l.positions >= 64 + 4 * (each + 1) &&
                  l.values - (l.positions + 2 * capacity) < 16 &&
                  l.values >= l.positions + 2 * capacity &&
                  l.nbytes - (l.values + 4 * capacity) < 16 && l.nbytes >= l.values + 4 * capacity,
              "numel %ld, ranges %ld, capacity %ld", long(numel), long(ranges), long(capacity));
        int64_t end = 0;
        for (int64_t r = 0; r < ranges; ++r) {
          const Range range = range_bounds(numel, ranges, r);
          CHECK(range.begin == end && range.end - range.begin <= each * 16384 &&
                    (range.end == numel || range.end == (r + 1) * each * 16384),
                "range %ld of %ld, numel %ld", long(r), long(ranges), long(numel));
          end = range.end;
        }
        CHECK(end == numel, "ranges cover the tensor");
      }
    }
  }
  // 64-bit throughout.
  CHECK(payload_layout(int64_t{1} << 40, UINT32_MAX, DType::kFloat32, 1).nbytes > 6ll * UINT32_MAX,
        "large");
}

void picks_are_the_published_ones() {
  // Worked out from the published definition, in Python.
  CHECK(hash32(0, 0, 0) == 0 && hash32(1, 2, 3) == 0xA99CD169u, "%08x", hash32(1, 2, 3));
  for (int64_t n :
       {int64_t{11}, int64_t{65537}, (int64_t{1} << 31) + 5, (int64_t{1} << 45) + 123}) {
    for (int64_t m : {int64_t{1}, int64_t{10}, int64_t{65536}, (int64_t{1} << 31) - 1}) {
      if (m >= n) continue;
      for (int64_t j : {int64_t{0}, int64_t{1}, m / 3, m / 2, m - 1}) {
        if (j >= m) continue;
        using Wide = unsigned __int128;
        const Wide start = Wide(j) * n / m, end = (Wide(j) + 1) * n / m;
        const Wide pick = start + ((Wide(hash32(9, 4, uint32_t(j))) * (end - start)) >> 32);
        CHECK(stratified_pick(j, n, m, 9, 4) == int64_t(pick), "n %ld, m %ld, j %ld", long(n),
              long(m), long(j));
      }
    }
  }
}

void encodings_are_the_smallest() {
  for (int64_t width : {1, 7, 8, 9, 64, 255, 256, 257, 1000, 65535, 65536, 65537, 100000}) {
    for (int64_t k : {1, 2, 3, 8, 31, 32, 33, 100, 4096, 60000}) {
      if (k > width) continue;
      int64_t best = (width + 7) / 8;
      auto encoding = PositionEncoding::kBitmap;
      if (width <= 256 && k < best) best = k, encoding = PositionEncoding::kUint8;
      if (width <= 65536 && 2 * k < best) best = 2 * k, encoding = PositionEncoding::kUint16;
      CHECK(position_bytes(width, k) == best && position_encoding(width, k) == encoding,
            "width %ld, k %ld", long(width), long(k));
    }
  }
}

}  // namespace

int main() {
  layout_is_as_documented();
  picks_are_the_published_ones();
  encodings_are_the_smallest();
}
