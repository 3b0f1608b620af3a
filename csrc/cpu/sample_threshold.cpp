// First the keys of all samples are gathered, in parallel over the samples. Then the k-th largest
// key of each range is selected, in parallel over the ranges.

#include <algorithm>
#include <cmath>
#include <memory>

#include "../common/floats.h"
#include "../common/hash.h"
#include "../common/payload.h"
#include "accumulate.h"
#include "kernels.h"
#include "simd_dispatch.h"

namespace dct::cpu {
namespace {

// The loop vectorizes because the count is as wide as the keys. n is below 2^31, so the count fits.
int32_t count_keys(const int32_t* keys, int64_t n, int32_t bound) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += keys[i] >= bound;
  return count;
}

// Moves the keys >= bound to the front and returns their number.
int64_t keep_keys(int32_t* keys, int64_t n, int32_t bound) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t key = keys[i];
    keys[count] = key;
    count += key >= bound;
  }
  return count;
}

// The k-th largest of n keys, 1 <= k <= n, found bit by bit from the highest. One vector loop per
// bit counts the keys that reach a bound. Overwrites the keys. Call it inside vectorize().
int32_t kth_largest(int32_t* keys, int64_t n, int64_t k) {
  int32_t bound = 0;
  int64_t found = n;  // the number of keys >= bound, always at least k
  for (int32_t bit = 1 << 30; bit != 0 && found > k; bit >>= 1) {
    const int64_t count = count_keys(keys, n, bound | bit);
    if (count < k) continue;
    bound |= bit;
    found = count;
    if (found <= n / 2) n = keep_keys(keys, n, bound);
  }
  int32_t smallest = INT32_MAX;
  for (int64_t i = 0; i < n; ++i) {
    smallest = std::min(smallest, keys[i] >= bound ? keys[i] : INT32_MAX);
  }
  return smallest;
}

constexpr int64_t kPicks = 256;   // picks that are prefetched together
constexpr int64_t kGrain = 8192;  // samples that justify another task

template <typename Grad>
class Sampler {
 public:
  explicit Sampler(const SampleThresholdArgs& args)
      : args_(args),
        grad_(static_cast<const Grad*>(args.grad)),
        inv_scale_(load_scale(args.inv_scale)),
        stride_(samples(0)),
        ranges_(args.numel > 0 ? ceil_div(args.numel, numel(0)) : 0),
        keys_(new int32_t[ranges_ * stride_]) {}

  void run(const Parallel& parallel) {
    const int64_t parts = std::min(parallel.threads, ceil_div(samples(0), kGrain));
    parallel.run(ranges_ * parts, [&](int64_t task) {
      gather(task / parts, share(samples(task / parts), parts, task % parts));
    });
    std::fill(args_.threshold + ranges_, args_.threshold + args_.ranges,
              bits_to_float(kFloat32Infinity));
    parallel.run(ranges_, [&](int64_t r) { args_.threshold[r] = select(r); });
  }

 private:
  Range bounds(int64_t r) const { return range_bounds(args_.numel, args_.ranges, r); }
  int64_t numel(int64_t r) const { return bounds(r).end - bounds(r).begin; }
  int64_t samples(int64_t r) const { return std::min(numel(r), args_.max_samples); }
  int32_t* keys(int64_t r) const { return keys_.get() + r * stride_; }

  int32_t key(int64_t i) const {
    return magnitude_key(accumulate(args_.residual[i], grad_, i, inv_scale_));
  }

  // Gathers the keys of the samples `span` of range r.
  void gather(int64_t r, Share span) const {
    int32_t* out = keys(r) + span.begin;
    if (numel(r) > args_.max_samples) return gather_picks(r, span, out);
    vectorize([=, first = bounds(r).begin + span.begin] {
      for (int64_t i = 0; i < span.end - span.begin; ++i) out[i] = key(first + i);
    });
  }

  // An incremental stratified_pick(), because consecutive strata need no division.
  void gather_picks(int64_t r, Share span, int32_t* out) const {
    const int64_t length = numel(r) / args_.max_samples, rest = numel(r) % args_.max_samples;
    int64_t start = bounds(r).begin + stratum_start(span.begin, numel(r), args_.max_samples);
    int64_t remainder = span.begin * rest % args_.max_samples;
    int64_t picks[kPicks];
    for (int64_t j = span.begin; j < span.end; j += kPicks) {
      const int64_t n = std::min(kPicks, span.end - j);
      for (int64_t i = 0; i < n; ++i) {
        remainder += rest;
        const int64_t longer = remainder >= args_.max_samples;
        picks[i] = start + pick_offset(length + longer, args_.seed, static_cast<uint32_t>(r),
                                       static_cast<uint32_t>(j + i));
        start += length + longer;
        remainder -= longer * args_.max_samples;
        __builtin_prefetch(grad_ + picks[i]);
        __builtin_prefetch(args_.residual + picks[i]);
      }
      for (int64_t i = 0; i < n; ++i) *out++ = key(picks[i]);
    }
  }

  float select(int64_t r) const {
    const int64_t n = samples(r);
    const double wanted = std::ceil(args_.density * static_cast<double>(n));
    const int64_t k = std::clamp<int64_t>(static_cast<int64_t>(wanted), 1, n);
    int32_t key = 0;
    vectorize([&] { key = kth_largest(keys(r), n, k); });
    return bits_to_float(key);
  }

  SampleThresholdArgs args_;
  const Grad* grad_;
  float inv_scale_;
  int64_t stride_;  // keys per range, sized for the first range, which is the longest
  int64_t ranges_;  // the number of ranges that are not empty
  std::unique_ptr<int32_t[]> keys_;
};

}  // namespace

void sample_threshold(const SampleThresholdArgs& args, const Parallel& parallel) {
  dispatch(args.grad_dtype, [&](auto grad) { Sampler<decltype(grad)>(args).run(parallel); });
}

}  // namespace dct::cpu
