#pragma once

// row_pack of rows too wide for a warp's registers, by a block each: a radix select that reads the
// row once per digit, then a pass in column order. From the second on, the row comes from a cache.

#include "radix_select.cuh"
#include "row_keys.cuh"
#include "row_pack_output.cuh"
#include "scan.cuh"

namespace dct::cuda {

constexpr int kWideThreads = 256;

struct RowPackWideShared {
  RadixSelectShared<kWideThreads> select;
  ScanStorage<kWideThreads> scan;
};

// The key of one column; of a NaN, that of infinity.
template <typename T>
__device__ int row_key(const T* row, int64_t column) {
  using Keys = RowKeys<T>;
  return min(Keys::key(Keys::load(row + column, 1), 0), Keys::kInfinity);
}

template <typename T>
__device__ Choice choose_wide(const T* row, int64_t width, int64_t k,
                              RadixSelectShared<kWideThreads>& shared) {
  const Selected selected =
      select_key<RowKeys<T>::kBits>(static_cast<uint32_t>(k), shared, [&](auto visit) {
        for (int64_t column = thread_index(); column < width; column += kWideThreads) {
          visit(static_cast<uint32_t>(row_key(row, column)));
        }
      });
  return {static_cast<int>(selected.digit), selected.rank};
}

template <typename T>
__global__ void __launch_bounds__(kWideThreads) row_pack_wide_kernel(RowPackArgs args) {
  __shared__ RowPackWideShared shared;
  const int64_t index = blockIdx.x;
  const T* row = static_cast<const T*>(args.x) + index * args.width;
  const PackedRow packed(args, index);
  const Choice choice = choose_wide(row, args.width, args.k, shared.select);

  int64_t above = 0, equal = 0;  // in the columns before
  for (int64_t begin = 0; begin < args.width; begin += kWideThreads) {
    const int64_t column = begin + thread_index();
    const int key = column < args.width ? row_key(row, column) : -1;
    const bool is_above = key > choice.cut, is_equal = key == choice.cut;
    // At most 256 of either: two counts in one scan.
    const Scanned both = scan<kWideThreads>(is_above | is_equal << 16, Sum{}, shared.scan);
    const int64_t above_before = above + (both.before & 0xffff);
    const int64_t equal_before = equal + (both.before >> 16);
    const bool chosen = is_above || (is_equal && equal_before < choice.ties);
    if (chosen) {
      packed.store(above_before + min(equal_before, choice.ties), column, to_float(row[column]));
    }
    if (packed.has_bitmap()) {
      const unsigned bits = __ballot_sync(kFullWarp, chosen);
      if (lane_index() % 8 == 0 && column < args.width) {
        packed.positions[column / 8] = static_cast<uint8_t>(bits >> lane_index());
      }
    }
    above += both.total & 0xffff;
    equal += both.total >> 16;
  }
}

}  // namespace dct::cuda
