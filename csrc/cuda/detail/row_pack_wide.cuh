#pragma once

// row_pack for rows too wide for the registers of a block, with one block per row. A radix select
// reads the row once per digit. A stable compaction then reads the row once more. The cache serves
// all reads after the first, unless the rows are too wide for it.

#include "radix_select.cuh"
#include "row_keys.cuh"
#include "row_pack_output.cuh"
#include "scan.cuh"

namespace dct::cuda {

struct RowPackWideShared {
  RadixSelectShared<kThreads> select;
  ScanStorage<kThreads> scan;
};

// The key of one column. A NaN gets the key of infinity.
template <typename T>
__device__ int row_key(const T* row, int64_t column) {
  using Keys = RowKeys<T>;
  return min(Keys::key(Keys::load(row + column, 1), 0), Keys::kInfinity);
}

template <typename T>
__device__ TopK select_top_k_wide(const T* row, int64_t width, int64_t k,
                                  RadixSelectShared<kThreads>& shared) {
  const Selected selected =
      select_key<RowKeys<T>::kBits>(static_cast<uint32_t>(k), shared, [&](auto visit) {
        for (int64_t column = thread_index(); column < width; column += kThreads) {
          visit(static_cast<uint32_t>(row_key(row, column)));
        }
      });
  return {static_cast<int>(selected.digit), selected.rank};
}

template <typename T>
__global__ void __launch_bounds__(kThreads) row_pack_wide_kernel(RowPackArgs args) {
  __shared__ RowPackWideShared shared;
  const int64_t index = blockIdx.x;
  const T* row = static_cast<const T*>(args.x) + index * args.width;
  const PackedRow packed(args, index);
  const TopK top_k = select_top_k_wide(row, args.width, args.k, shared.select);

  int64_t above = 0, equal = 0;  // counts in earlier columns
  for (int64_t begin = 0; begin < args.width; begin += kThreads) {
    const int64_t column = begin + thread_index();
    const int key = column < args.width ? row_key(row, column) : -1;
    const bool is_above = key > top_k.threshold, is_equal = key == top_k.threshold;
    // Each of the two counts is at most 256, so one scan handles both.
    const ScanResult both = scan<kThreads>(is_above | is_equal << 16, Sum{}, shared.scan);
    const int64_t above_before = above + (both.exclusive & 0xffff);
    const int64_t equal_before = equal + (both.exclusive >> 16);
    const bool selected = is_above || (is_equal && equal_before < top_k.ties);
    if (selected) {
      packed.store(above_before + min(equal_before, top_k.ties), column, to_float(row[column]));
    }
    if (packed.has_bitmap()) {
      const unsigned bits = __ballot_sync(kFullWarp, selected);
      if (lane_index() % 8 == 0 && column < args.width) {
        packed.positions[column / 8] = static_cast<uint8_t>(bits >> lane_index());
      }
    }
    above += both.aggregate & 0xffff;
    equal += both.aggregate >> 16;
  }
}

}  // namespace dct::cuda
