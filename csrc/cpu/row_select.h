#pragma once

// Which k columns of a row have the largest magnitudes, for sixteen rows at a time. A bound that k
// columns of a row reach, and few more, leaves few to look for the k-th among, and that is done in
// all rows at once (kth_in_lanes.h). Rows are mostly like those before: their bound is tried first.
// Where too few or many reach it, the k-th largest of the maxima of disjoint groups of columns is
// one.

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

// What the bits of every X are multiples of in float32.
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

  // x: [rows, width], 1 <= rows <= kLanes. Up to `ahead` rows after them are prefetched meanwhile.
  void select(const X* x, int64_t rows, int64_t ahead) {
    vectorize_rows([&](auto how) {
      narrow(how, x, rows, ahead);
      Lanes bound = bound_, count = count_;
      const int32_t most = *std::max_element(count.at, count.at + rows);
      how.turn(listed_.get(), stride_, count, most, keys_.get());
      raise_bounds(how, keys_.get(), most, k_, kUnit<X>, INT32_MAX, bound);
      for (int64_t row = 0; row < rows; ++row) {
        // The excess is overwritten by the next row.
        float* kept = kept_.get() + row * k_;
        int32_t* columns = columns_.get() + row * k_;
        const int64_t n =
            how.list(listed(row), listed_columns(row), count.at[row], bound.at[row], kept, columns);
        if (n > k_) drop_ties(kept, columns, n, bound.at[row]);
      }
      learn(bound, rows);
    });
  }

  // Of the rows selected last: [rows, k], columns ascending.
  const float* kept() const { return kept_.get(); }
  const int32_t* columns() const { return columns_.get(); }

 private:
  // Number of groups: fewer are searched sooner, but more columns reach the k-th largest maximum.
  static int64_t group_count(int64_t padded, int64_t k) {
    int64_t groups = padded;
    while (groups > kLanes && whole_lanes(groups / 2) >= k + k / 5) {
      groups = whole_lanes(groups / 2);
    }
    return groups;
  }

  // A row in float32, filled up to whole vectors with 0.0: that ties with no column but one of 0.0,
  // and these are before it.
  const float* as_floats(const X* x) const {
    if constexpr (std::is_same_v<X, float>) {
      if (width_ == padded_) return x;
    }
    for (int64_t i = 0; i < width_; ++i) row_[i] = to_float(x[i]);
    return row_.get();
  }

  float* listed(int64_t row) const { return listed_.get() + row * stride_; }
  int32_t* listed_columns(int64_t row) const { return listed_columns_.get() + row * stride_; }

  // Lists what reaches a row's bound; whether it is enough, and few enough to have been worth it.
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
      constexpr int kRoughly = 6;  // rounds, for a bound that a few more reach
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

  // What is past the last whole vector is left out: it could only raise them.
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

  // Of n entries that reach the bound, more than k, keeps what is above and the first that tie.
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

  // The bound to try next sinks at once and rises slowly, so that next to no row like these has
  // fewer than k above it. Where rows are not alike it is given up for a while.
  void learn(const Lanes& kth, int64_t rows) {
    const int32_t least = *std::min_element(kth.at, kth.at + rows);
    near_ = least < near_ ? least : near_ + ((least - near_) / 8 & -kUnit<X>);
    pause_ = pause_ > 0 ? pause_ - 1 : 4 * misses_ > rows ? 8 : 0;
  }

  int64_t width_, k_, padded_, stride_, groups_;
  std::unique_ptr<int32_t[]> all_columns_;     // [padded]: 0 and up
  std::unique_ptr<float[]> row_;               // [padded], in float32
  std::unique_ptr<float[]> maxima_;            // [kLanes, groups]
  std::unique_ptr<float[]> listed_;            // [kLanes, stride], what reaches a row's bound
  std::unique_ptr<int32_t[]> listed_columns_;  // and where
  std::unique_ptr<int32_t[]> keys_;            // [padded, kLanes], of either
  std::unique_ptr<float[]> kept_;              // [kLanes, k], and room for more of the last row
  std::unique_ptr<int32_t[]> columns_;
  Lanes bound_, count_;  // of what is listed
  int32_t near_ = INT32_MAX;
  int64_t misses_ = 0, pause_ = 1;
};

}  // namespace dct::cpu
