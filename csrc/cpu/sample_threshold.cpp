// First the keys of all segments' samples are gathered into one array, in parallel over the
// samples; then each segment's k-th largest key is found, in parallel over the segments.

#include "sample_threshold.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "../common/hash.h"
#include "../common/rounding.h"
#include "accumulate.h"
#include "largest.h"
#include "vectorise.h"

namespace dct::cpu {
namespace {

constexpr int64_t kBatch = 256;   // picks whose cache misses overlap
constexpr int64_t kGrain = 8192;  // samples worth a task of their own

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
    keys_.reset(new int32_t[first_.back()]);
  }

  void run(const Parallel& parallel) {
    const int64_t keys = first_.back();
    const int64_t tasks = std::min(parallel.threads, (keys + kGrain - 1) / kGrain);
    parallel.run(tasks, [&](int64_t task) { gather(share(keys, tasks, task)); });
    parallel.run(args_.num_segments, [&](int64_t s) { select(s); });
  }

 private:
  int64_t numel(int64_t s) const { return args_.segments[s + 1] - args_.segments[s]; }
  int64_t samples(int64_t s) const { return std::min(numel(s), args_.max_samples); }

  void gather(Share mine) const {
    int64_t s = std::upper_bound(first_.begin(), first_.end(), mine.begin) - first_.begin() - 1;
    for (int64_t i = mine.begin, end; i < mine.end; i = end, ++s) {
      end = std::min(mine.end, first_[s + 1]);
      const int64_t begin = i - first_[s];
      const int64_t n = std::min(end - first_[s], samples(s)) - begin;
      if (n > 0) gather(s, begin, n, keys_.get() + i);
    }
  }

  // The keys of samples [begin, begin + n) of segment s.
  void gather(int64_t s, int64_t begin, int64_t n, int32_t* keys) const {
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
    vectorise([=] {
      for (int64_t i = 0; i < n; ++i) keys[i] = key(begin + i);
    });
  }

  void gather_picks(int64_t s, int64_t begin, int64_t end, int32_t* keys) const {
    int64_t picks[kBatch];
    for (int64_t j = begin; j < end; j += kBatch) {
      const int64_t n = std::min(kBatch, end - j);
      for (int64_t i = 0; i < n; ++i) {
        picks[i] = args_.segments[s] + stratified_pick(j + i, numel(s), args_.max_samples,
                                                       args_.seed, static_cast<uint32_t>(s));
        __builtin_prefetch(x_ + picks[i]);
        if (args_.residual != nullptr) __builtin_prefetch(args_.residual + picks[i]);
      }
      for (int64_t i = 0; i < n; ++i) *keys++ = key(picks[i]);
    }
  }

  void select(int64_t s) const {
    const int64_t n = samples(s);
    std::fill(keys_.get() + first_[s] + n, keys_.get() + first_[s + 1], kNoKey);
    int32_t key = kFloat32Infinity;
    if (n > 0) {
      const double wanted = std::ceil(args_.density * static_cast<double>(n));
      const int64_t k = std::clamp<int64_t>(static_cast<int64_t>(wanted), 1, n);
      vectorise_keys([&](auto how) { key = kth_largest(how, keys_.get() + first_[s], n, k); });
    }
    args_.threshold[s] = bits_to_float(key);
  }

  SampleThresholdArgs args_;
  const X* x_;
  float inv_scale_;
  std::vector<int64_t> first_;  // of each segment's samples in keys_
  std::unique_ptr<int32_t[]> keys_;
};

}  // namespace

void sample_threshold(const SampleThresholdArgs& args, const Parallel& parallel) {
  dispatch(args.x_dtype, [&](auto x) { Sampler<decltype(x)>(args).run(parallel); });
}

}  // namespace dct::cpu
