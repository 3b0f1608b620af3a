#pragma once

// Selects the k columns of largest magnitude in each row, for up to sixteen rows together. First a
// bound narrows each row to k columns or somewhat more. Then the k-th largest key is found among
// these columns, in all rows together (kth_in_lanes.h). Rows mostly resemble the previous rows, so
// a bound that suited the previous rows is tried first. If too few or too many columns reach this
// bound, it is replaced. At least k maxima of disjoint column groups reach the new bound.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <type_traits>

#include "../common/floats.h"
#include "kth_in_lanes.h"
#include "row_lanes.h"

namespace dct::cpu {

constexpr int64_t whole_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The bits of any X, converted to float32, are a multiple of this unit.
template <typename X>
constexpr int32_t kUnit = std::is_same_v<X, float>      ? 1
                          : std::is_same_v<X, BFloat16> ? 1 << 16
                                                        : 1 << 13;

template <typename X>
class RowSelector {
 public:
  RowSelector(int64_t width, int64_t k)
      : width_(width),
        k_(k),
        padded_(whole_lanes(width)),
        stride_(padded_ + kLanes),
        groups_(group_count(padded_, k)),
        all_columns_(new int32_t[padded_]),
        row_(new float[padded_]()),
        maxima_(new float[kLanes * groups_]),
        listed_(new float[kLanes * stride_]),
        listed_columns_(new int32_t[kLanes * stride_]),
        keys_(new int32_t[kLanes * padded_]),
        kept_(new float[kLanes * k + stride_]),
        columns_(new int32_t[kLanes * k + stride_]) {
    std::iota(all_columns_.get(), all_columns_.get() + padded_, 0);
  }

  // x: [rows, width], 1 <= rows <= kLanes. Also prefetches up to `ahead` of the rows after them.
  void select(const X* x, int64_t rows, int64_t ahead) {
    vectorize_rows([&](auto how) {
      narrow(how, x, rows, ahead);
      Lanes bound = bound_, count = count_;
      const int32_t most = *std::max_element(count.at, count.at + rows);
      how.turn(listed_.get(), stride_, count, most, keys_.get());
      raise_bounds(how, keys_.get(), most, k_, kUnit<X>, INT32_MAX, bound);
      for (int64_t row = 0; row < rows; ++row) {
        // The next row overwrites the excess.
        float* kept = kept_.get() + row * k_;
        int32_t* columns = columns_.get() + row * k_;
        const int64_t n =
            how.list(listed(row), listed_columns(row), count.at[row], bound.at[row], kept, columns);
        if (n > k_) drop_ties(kept, columns, n, bound.at[row]);
      }
      learn(bound, rows);
    });
  }

  // The result of the last select(): [rows, k], columns ascending.
  const float* kept() const { return kept_.get(); }
  const int32_t* columns() const { return columns_.get(); }

 private:
  // Fewer groups are searched faster, but then more columns reach the k-th largest maximum.
  static int64_t group_count(int64_t padded, int64_t k) {
    int64_t groups = padded;
    while (groups > kLanes && whole_lanes(groups / 2) >= k + k / 5) {
      groups = whole_lanes(groups / 2);
    }
    return groups;
  }

  // A row in float32, padded to whole vectors with 0.0. On ties the earlier columns win, so the
  // padding is never selected.
  const float* as_floats(const X* x) const {
    if constexpr (std::is_same_v<X, float>) {
      if (width_ == padded_) return x;
    }
    for (int64_t i = 0; i < width_; ++i) row_[i] = to_float(x[i]);
    return row_.get();
  }

  float* listed(int64_t row) const { return listed_.get() + row * stride_; }
  int32_t* listed_columns(int64_t row) const { return listed_columns_.get() + row * stride_; }

  // Lists the columns that reach the bound of a row. Returns false if too few or too many do.
  template <typename Rows>
  bool list(Rows, const X* x, int64_t row) {
    const int64_t n = Rows::list(as_floats(x + row * width_), all_columns_.get(), padded_,
                                 bound_.at[row], listed(row), listed_columns(row));
    count_.at[row] = static_cast<int32_t>(n);
    return n >= k_ && n <= 2 * k_ + kLanes;
  }

  template <typename Rows>
  void narrow(Rows how, const X* x, int64_t rows, int64_t ahead) {
    constexpr int64_t kLine = 64 / sizeof(X);
    const X* next = x + rows * width_;
    for (int l = 0; l < kLanes; ++l) {
      bound_.at[l] = l < rows ? near_ : 0;
      count_.at[l] = 0;
    }
    bool missed[kLanes];
    misses_ = 0;
    for (int64_t row = 0; row < rows; ++row) {
      if (row < ahead) {
        for (int64_t i = 0; i < width_; i += kLine) __builtin_prefetch(next + row * width_ + i);
      }
      missed[row] = pause_ > 0 || !list(how, x, row);
      misses_ += missed[row];
    }
    if (misses_ == 0) return;
    Lanes bound = {};
    if (groups_ < padded_) {
      constexpr int kRoughly = 6;  // rounds; then more than k maxima may reach the bound
      Lanes count = {};
      for (int64_t row = 0; row < rows; ++row) {
        if (!missed[row]) continue;
        group_maxima(x + row * width_, maxima_.get() + row * groups_);
        count.at[row] = static_cast<int32_t>(groups_);
      }
      Rows::turn(maxima_.get(), groups_, count, groups_, keys_.get());
      bound = least_keys(keys_.get(), groups_);
      raise_bounds(how, keys_.get(), groups_, k_, kUnit<X>, kRoughly, bound);
    }
    for (int64_t row = 0; row < rows; ++row) {
      if (!missed[row]) continue;
      bound_.at[row] = bound.at[row];
      list(how, x, row);
    }
  }

  // Skips the columns past the last whole vector. They could only raise the maxima, and without
  // them the bound still lets at least k columns pass.
  void group_maxima(const X* x, float* out) const {
    const int64_t whole = width_ / kLanes * kLanes;
    for (int64_t group = 0; group < groups_; group += kLanes) {
      Lanes top;
      for (int l = 0; l < kLanes; ++l) top.at[l] = 0;
      for (int64_t i = group; i < whole; i += groups_) {
        for (int l = 0; l < kLanes; ++l) {
          const int32_t key = magnitude_bits(to_float(x[i + l]));
          top.at[l] = key > top.at[l] ? key : top.at[l];
        }
      }
      for (int l = 0; l < kLanes; ++l) out[group + l] = bits_to_float(top.at[l]);
    }
  }

  // Keeps k of the n > k entries that reach the bound: all entries above the bound, and the first
  // of the entries that equal it.
  void drop_ties(float* x, int32_t* columns, int64_t n, int32_t bound) const {
    const int32_t tie = bound < static_cast<int32_t>(kFloat32Infinity) ? bound : INT32_MAX;
    int64_t ties = k_;  // to keep
    for (int64_t i = 0; i < n; ++i) ties -= magnitude_bits(x[i]) > tie;
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
      const bool above = magnitude_bits(x[i]) > tie;
      x[count] = x[i];
      columns[count] = columns[i];
      count += above || ties > 0;
      ties -= !above;
    }
  }

  // The bound to try next falls immediately and rises slowly. So if rows are similar, at least k
  // columns of almost every row reach it. If the rows differ too much, the next eight calls do not
  // try it.
  void learn(const Lanes& kth, int64_t rows) {
    const int32_t least = *std::min_element(kth.at, kth.at + rows);
    near_ = least < near_ ? least : near_ + ((least - near_) / 8 & -kUnit<X>);
    pause_ = pause_ > 0 ? pause_ - 1 : 4 * misses_ > rows ? 8 : 0;
  }

  int64_t width_, k_, padded_, stride_, groups_;
  std::unique_ptr<int32_t[]> all_columns_;     // [padded]: 0, 1, 2, ...
  std::unique_ptr<float[]> row_;               // [padded], in float32
  std::unique_ptr<float[]> maxima_;            // [kLanes, groups]
  std::unique_ptr<float[]> listed_;            // [kLanes, stride]: entries that reach the bound
  std::unique_ptr<int32_t[]> listed_columns_;  // [kLanes, stride]: their columns
  std::unique_ptr<int32_t[]> keys_;  // [padded, kLanes]: of the maxima or the listed entries
  std::unique_ptr<float[]> kept_;    // [kLanes, k], and space for the excess of the last row
  std::unique_ptr<int32_t[]> columns_;
  Lanes bound_, count_;  // per row: the bound, and the number of listed entries
  int32_t near_ = INT32_MAX;
  int64_t misses_ = 0, pause_ = 1;
};

}  // namespace dct::cpu
