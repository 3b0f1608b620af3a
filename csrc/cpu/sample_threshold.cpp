// Segments are taken in batches, whose keys the second-level caches hold. First the keys of a
// batch's samples are gathered into one array, in parallel over the samples; then each segment's
// k-th largest key is found, in parallel over the segments.

#include "sample_threshold.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "../common/hash.h"
#include "../common/rounding.h"
#include "accumulate.h"
#include "kth_largest.h"
#include "simd_dispatch.h"

namespace dct::cpu {
namespace {

constexpr int64_t kPicks = 256;          // picks whose cache misses overlap
constexpr int64_t kGrain = 8192;         // samples worth a task of their own
constexpr int64_t kBatchKeys = 1 << 17;  // keys per thread, unless one segment has more

template <typename X>
class Sampler {
 public:
  explicit Sampler(const SampleThresholdArgs& args)
      : args_(args),
        x_(static_cast<const X*>(args.x)),
        inv_scale_(args.inv_scale != nullptr ? *args.inv_scale : 1.0f),
        first_(args.num_segments + 1) {
    for (int64_t s = 0; s < args.num_segments; ++s) {
      first_[s + 1] = first_[s] + padded_keys(samples(s));
    }
  }

  void run(const Parallel& parallel) {
    const int64_t most = kBatchKeys * parallel.threads;
    std::vector<int64_t> batches = {0};
    int64_t longest = 0;
    while (batches.back() < args_.num_segments) {
      const int64_t begin = batches.back();
      const auto past =
          std::upper_bound(first_.begin() + begin, first_.end(), first_[begin] + most);
      batches.push_back(std::max(begin + 1, past - first_.begin() - 1));
      longest = std::max(longest, first_[batches.back()] - first_[begin]);
    }
    keys_.reset(new int32_t[longest]);
    for (size_t b = 0; b + 1 < batches.size(); ++b) batch(batches[b], batches[b + 1], parallel);
  }

 private:
  int64_t numel(int64_t s) const { return args_.segments[s + 1] - args_.segments[s]; }
  int64_t samples(int64_t s) const { return std::min(numel(s), args_.max_samples); }

  // Segments [begin, end).
  void batch(int64_t begin, int64_t end, const Parallel& parallel) const {
    const int64_t before = first_[begin], keys = first_[end] - before;
    const int64_t tasks = std::min(parallel.threads, (keys + kGrain - 1) / kGrain);
    parallel.run(tasks, [&](int64_t task) {
      const Share span = share(keys, tasks, task);
      gather(before + span.begin, before + span.end, before);
    });
    parallel.run(end - begin,
                 [&](int64_t s) { select(begin + s, keys_.get() + first_[begin + s] - before); });
  }

  // Samples [begin, end) of all, counted as first_ does, in a batch with `before` before it.
  void gather(int64_t begin, int64_t end, int64_t before) const {
    int64_t s = std::upper_bound(first_.begin(), first_.end(), begin) - first_.begin() - 1;
    for (int64_t next; begin < end; begin = next, ++s) {
      next = std::min(end, first_[s + 1]);
      const int64_t sample = begin - first_[s];
      const int64_t n = std::min(next - first_[s], samples(s)) - sample;
      if (n > 0) gather_segment(s, sample, n, keys_.get() + (begin - before));
    }
  }

  // The keys of samples [begin, begin + n) of segment s.
  void gather_segment(int64_t s, int64_t begin, int64_t n, int32_t* keys) const {
    if (numel(s) <= args_.max_samples) {
      gather_all(args_.segments[s] + begin, n, keys);
    } else {
      gather_picks(s, begin, begin + n, keys);
    }
  }

  int32_t key(int64_t i) const {
    if (args_.residual == nullptr) return magnitude_key(to_float(x_[i]) * inv_scale_);
    return magnitude_key(accumulate(args_.residual[i], x_, i, inv_scale_));
  }

  void gather_all(int64_t begin, int64_t n, int32_t* keys) const {
    vectorize([=] {
      for (int64_t i = 0; i < n; ++i) keys[i] = key(begin + i);
    });
  }

  // Incremental stratified_pick(): consecutive strata need no division.
  void gather_picks(int64_t s, int64_t begin, int64_t end, int32_t* keys) const {
    const int64_t length = numel(s) / args_.max_samples, rest = numel(s) % args_.max_samples;
    int64_t start = args_.segments[s] + stratum_start(begin, numel(s), args_.max_samples);
    int64_t remainder = begin * rest % args_.max_samples;
    int64_t picks[kPicks];
    for (int64_t j = begin; j < end; j += kPicks) {
      const int64_t n = std::min(kPicks, end - j);
      for (int64_t i = 0; i < n; ++i) {
        remainder += rest;
        const int64_t longer = remainder >= args_.max_samples;
        picks[i] = start + pick_offset(length + longer, args_.seed, static_cast<uint32_t>(s),
                                       static_cast<uint32_t>(j + i));
        start += length + longer;
        remainder -= longer * args_.max_samples;
        __builtin_prefetch(x_ + picks[i]);
        if (args_.residual != nullptr) __builtin_prefetch(args_.residual + picks[i]);
      }
      for (int64_t i = 0; i < n; ++i) *keys++ = key(picks[i]);
    }
  }

  void select(int64_t s, int32_t* keys) const {
    const int64_t n = samples(s);
    std::fill(keys + n, keys + padded_keys(n), kNoKey);
    int32_t key = kFloat32Infinity;
    if (n > 0) {
      const double wanted = std::ceil(args_.density * static_cast<double>(n));
      const int64_t k = std::clamp<int64_t>(static_cast<int64_t>(wanted), 1, n);
      vectorize_keys([&](auto how) { key = kth_largest(how, keys, n, k); });
    }
    args_.threshold[s] = bits_to_float(key);
  }

  SampleThresholdArgs args_;
  const X* x_;
  float inv_scale_;
  std::vector<int64_t> first_;       // of each segment's samples, filled up to whole groups
  std::unique_ptr<int32_t[]> keys_;  // of one batch
};

}  // namespace

void sample_threshold(const SampleThresholdArgs& args, const Parallel& parallel) {
  dispatch(args.x_dtype, [&](auto x) { Sampler<decltype(x)>(args).run(parallel); });
}

}  // namespace dct::cpu
