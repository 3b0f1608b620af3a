// sample_threshold.cu -- radix select over the picks of every segment: three digits of the 31-bit
// magnitude, most significant first.
//
// Few picks: one block per segment holds their keys in registers and finds all three digits. In the
// smallest case it gathers the keys itself (one kernel), else a first kernel gathers them with the
// whole device. Many picks: one kernel per digit. The blocks of a segment add to its histogram the
// picks that match the digits found so far; the last block to finish selects the next digit. Each
// pass gathers the picks again, from the cache, rather than store their keys.
#include <algorithm>
#include <cmath>

#include "../common/hash.h"
#include "../common/rounding.h"
#include "detail/elements.cuh"
#include "detail/launch.cuh"
#include "detail/radix_select.cuh"
#include "sample_threshold.cuh"

namespace dct::cuda {
namespace {

struct Policy {
  static constexpr int kThreads = 256, kMinBlocks = 4;
  static constexpr int kInFlight = 4;  // picks per thread before the first is counted
  // Blocks per segment: one for so many picks, but no more than fill the device.
  static constexpr int kPicks = kThreads * kInFlight;
  static constexpr int kMaxBlocks = 2048, kMinPerSegment = 8;
  // Few picks: a segment's keys fit the registers of one block, and all keys fit 4 MB. Direct: so
  // few that the block gathers them itself, 16 sectors per thread in flight.
  static constexpr int kFewThreads = 512, kThreadKeys = 32, kDirectKeys = 8;
  static constexpr int64_t kFewPicks = kFewThreads * kThreadKeys, kFewKeys = 1 << 20;
  static constexpr int64_t kDirectPicks = kFewThreads * kDirectKeys;
};

bool are_few(const SampleThresholdArgs& args) {
  return args.max_samples <= Policy::kFewPicks &&
         args.num_segments <= Policy::kFewKeys / args.max_samples;
}

bool are_direct(const SampleThresholdArgs& args) {
  return args.max_samples <= Policy::kDirectPicks;
}

using MagnitudeDigits = Digits<31>;
constexpr int kPasses = MagnitudeDigits::kPasses;

struct SegmentState {
  uint32_t histogram[kBins];
  uint32_t prefix;         // digits found so far
  uint32_t rank;           // rank of the k-th largest among keys with this prefix
  unsigned done[kPasses];  // blocks that have counted, in each pass
};

struct Shared {
  uint32_t histogram[kBins];
  SelectStorage<Policy::kThreads> select;
  bool last;
};

struct Segment {
  int64_t index, begin, numel, picks;
};

__device__ Segment find_segment(const SampleThresholdArgs& args, int64_t numel, int64_t index) {
  Segment segment;
  segment.index = index;
  segment.begin = min(max(args.segments[index], int64_t{0}), numel);
  const int64_t end = min(args.segments[index + 1], numel);
  segment.numel = max(end, segment.begin) - segment.begin;
  segment.picks = min(segment.numel, args.max_samples);
  return segment;
}

__device__ int64_t place_of(const SampleThresholdArgs& args, const Segment& segment, int64_t pick) {
  if (segment.picks == segment.numel) return segment.begin + pick;
  return segment.begin + stratified_pick(pick, segment.numel, segment.picks, args.seed,
                                         static_cast<uint32_t>(segment.index));
}

__device__ float scale_of(const SampleThresholdArgs& args) {
  return args.inv_scale != nullptr ? *args.inv_scale : 1.0f;
}

__device__ uint32_t first_rank(double density, int64_t picks) {
  const double wanted = ceil(__dmul_rn(density, static_cast<double>(picks)));
  return static_cast<uint32_t>(min(max(wanted, 1.0), static_cast<double>(picks)));
}

// Gathers the keys of segment s to keys[s * args.max_samples], one thread per pick.
template <typename T>
__global__ void __launch_bounds__(Policy::kThreads, Policy::kMinBlocks)
    gather_keys_kernel(SampleThresholdArgs args, int64_t numel, int per_segment, uint32_t* keys) {
  const Segment segment = find_segment(args, numel, blockIdx.x / per_segment);
  const int64_t pick = int64_t{blockIdx.x % per_segment} * Policy::kThreads + thread_index();
  if (pick >= segment.picks) return;
  const int64_t place = place_of(args, segment, pick);
  const T x = static_cast<const T*>(args.x)[place];
  const float residual = args.residual != nullptr ? args.residual[place] : 0.0f;
  const float acc = accumulate(residual, x, scale_of(args));
  keys[segment.index * args.max_samples + pick] = magnitude_key(acc);
}

// Selects a segment's threshold from the keys in this block's registers. They are padded with
// zeros, which rank last.
template <int kKeys>
__device__ void select_threshold(const SampleThresholdArgs& args, const Segment& segment,
                                 const uint32_t (&thread_keys)[kKeys],
                                 RadixSelectShared<Policy::kFewThreads>& shared) {
  const int picks = static_cast<int>(segment.picks);
  uint32_t key = kFloat32Infinity;
  if (picks > 0) {
    key = select_key<31>(first_rank(args.density, picks), shared, [&](auto visit) {
#pragma unroll
            for (int i = 0; i < kKeys; ++i) {
              if (i % 4 == 0 && i * Policy::kFewThreads >= picks) break;
              visit(thread_keys[i]);
            }
          }).digit;
  }
  if (thread_index() == 0) args.threshold[segment.index] = bits_to_float(key);
}

// Selects from gathered keys. All loads of a thread are issued before the first key is used.
__global__ void __launch_bounds__(Policy::kFewThreads)
    select_key_kernel(SampleThresholdArgs args, int64_t numel, const uint32_t* keys) {
  __shared__ RadixSelectShared<Policy::kFewThreads> shared;
  const Segment segment = find_segment(args, numel, blockIdx.x);
  keys += segment.index * args.max_samples;
  uint32_t thread_keys[Policy::kThreadKeys];
#pragma unroll
  for (int i = 0; i < Policy::kThreadKeys; ++i) {
    const int pick = i * Policy::kFewThreads + thread_index();
    thread_keys[i] = pick < segment.picks ? keys[pick] : 0;
  }
  select_threshold(args, segment, thread_keys, shared);
}

// Gathers the keys and selects from them. Threads past the end load the last pick again and discard
// it.
template <typename T>
__global__ void __launch_bounds__(Policy::kFewThreads)
    select_pick_kernel(SampleThresholdArgs args, int64_t numel) {
  __shared__ RadixSelectShared<Policy::kFewThreads> shared;
  const Segment segment = find_segment(args, numel, blockIdx.x);
  uint32_t thread_keys[Policy::kDirectKeys] = {};
  if (segment.picks > 0) {
    T x[Policy::kDirectKeys];
    float residual[Policy::kDirectKeys] = {};
#pragma unroll
    for (int i = 0; i < Policy::kDirectKeys; ++i) {
      const int64_t pick = i * Policy::kFewThreads + thread_index();
      const int64_t place = place_of(args, segment, min(pick, segment.picks - 1));
      x[i] = static_cast<const T*>(args.x)[place];
      if (args.residual != nullptr) residual[i] = args.residual[place];
    }
    const float scale = scale_of(args);
#pragma unroll
    for (int i = 0; i < Policy::kDirectKeys; ++i) {
      const int64_t pick = i * Policy::kFewThreads + thread_index();
      if (pick < segment.picks) {
        thread_keys[i] = magnitude_key(accumulate(residual[i], x[i], scale));
      }
    }
  }
  select_threshold(args, segment, thread_keys, shared);
}

// Adds one digit of a block's picks to the histogram. All addresses are computed before the first
// load, and all loads issued before the first key is computed. Past the end the last pick is loaded
// again.
template <typename T>
__device__ void count(const SampleThresholdArgs& args, const Segment& segment, int64_t blocks,
                      int64_t block, Digit digit, uint32_t prefix, uint32_t* histogram) {
  const float scale = scale_of(args);
  const int64_t stride = blocks * Policy::kThreads;
  const int64_t first = block * Policy::kThreads + thread_index();
  for (int64_t pick = first; pick < segment.picks; pick += stride * Policy::kInFlight) {
    int64_t place[Policy::kInFlight];
    T x[Policy::kInFlight];
    float residual[Policy::kInFlight] = {};
#pragma unroll
    for (int q = 0; q < Policy::kInFlight; ++q) {
      place[q] = place_of(args, segment, min(pick + q * stride, segment.picks - 1));
    }
#pragma unroll
    for (int q = 0; q < Policy::kInFlight; ++q) {
      x[q] = static_cast<const T*>(args.x)[place[q]];
      if (args.residual != nullptr) residual[q] = args.residual[place[q]];
    }
#pragma unroll
    for (int q = 0; q < Policy::kInFlight; ++q) {
      if (pick + q * stride >= segment.picks) break;
      const uint32_t key = magnitude_key(accumulate(residual[q], x[q], scale));
      if (key >> (digit.shift + digit.bits) != prefix) continue;
      atomicAdd(&histogram[key >> digit.shift & ((1u << digit.bits) - 1)], 1u);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(Policy::kThreads, Policy::kMinBlocks)
    sample_threshold_kernel(SampleThresholdArgs args, int64_t numel, int per_segment,
                            SegmentState* states, int pass) {
  __shared__ Shared shared;
  const Segment segment = find_segment(args, numel, blockIdx.x / per_segment);
  const int64_t wanted = (segment.picks + Policy::kPicks - 1) / Policy::kPicks;
  const int64_t blocks = min(max(wanted, int64_t{1}), int64_t{per_segment});
  const int64_t block = blockIdx.x % per_segment;
  if (block >= blocks) return;
  if (segment.picks == 0) {
    if (thread_index() == 0) args.threshold[segment.index] = bits_to_float(kFloat32Infinity);
    return;
  }
  const Digit digit = MagnitudeDigits::at(pass);
  SegmentState& state = states[segment.index];
  const uint32_t prefix = state.prefix;  // cleared to 0 before the first pass
  const uint32_t rank = pass == 0 ? first_rank(args.density, segment.picks) : state.rank;

  for (int b = thread_index(); b < kBins; b += Policy::kThreads) shared.histogram[b] = 0;
  __syncthreads();
  count<T>(args, segment, blocks, block, digit, prefix, shared.histogram);
  __syncthreads();
  for (int b = thread_index(); b < kBins; b += Policy::kThreads) {
    if (shared.histogram[b] > 0) atomicAdd(&state.histogram[b], shared.histogram[b]);
  }
  __syncthreads();
  if (thread_index() == 0) {
    shared.last = add_acquire_release(&state.done[pass], 1) == blocks - 1;
  }
  __syncthreads();
  if (!shared.last) return;

  Selected selected;
  if (!select_digit(state.histogram, rank, shared.select, selected)) return;
  state.prefix = prefix << digit.bits | selected.digit;
  state.rank = selected.rank;
  if (pass == kPasses - 1) args.threshold[segment.index] = bits_to_float(state.prefix);
}

template <typename T>
cudaError_t run_few(const SampleThresholdArgs& args, int64_t numel, uint32_t* keys,
                    cudaStream_t stream) {
  const auto segments = static_cast<unsigned>(args.num_segments);
  if (are_direct(args)) {
    return launch(select_pick_kernel<T>, dim3(segments), Policy::kFewThreads, 0, stream, args,
                  numel);
  }
  const int64_t picks = std::min(args.max_samples, numel);
  const int64_t per_segment =
      std::max<int64_t>((picks + Policy::kThreads - 1) / Policy::kThreads, 1);
  const cudaError_t gathered =
      launch(gather_keys_kernel<T>, dim3(segments * static_cast<unsigned>(per_segment)),
             Policy::kThreads, 0, stream, args, numel, static_cast<int>(per_segment), keys);
  if (gathered != cudaSuccess) return gathered;
  return launch(select_key_kernel, dim3(segments), Policy::kFewThreads, 0, stream, args, numel,
                keys);
}

template <typename T>
cudaError_t run_many(const SampleThresholdArgs& args, int64_t numel, SegmentState* states,
                     cudaStream_t stream) {
  const cudaError_t cleared =
      cudaMemsetAsync(states, 0, sizeof(SegmentState) * args.num_segments, stream);
  if (cleared != cudaSuccess) return cleared;
  const int64_t picks = std::min(args.max_samples, numel);
  const int64_t wanted = (picks + Policy::kPicks - 1) / Policy::kPicks;
  const int64_t most =
      std::max<int64_t>(Policy::kMaxBlocks / args.num_segments, Policy::kMinPerSegment);
  const int64_t per_segment = std::max<int64_t>(std::min(wanted, most), 1);
  const int64_t blocks = per_segment * args.num_segments;
  if (blocks > kMaxGrid) return cudaErrorInvalidValue;
  for (int pass = 0; pass < kPasses; ++pass) {
    const cudaError_t launched =
        launch(sample_threshold_kernel<T>, dim3(static_cast<unsigned>(blocks)), Policy::kThreads, 0,
               stream, args, numel, static_cast<int>(per_segment), states, pass);
    if (launched != cudaSuccess) return launched;
  }
  return cudaSuccess;
}

}  // namespace

int64_t sample_threshold_scratch_bytes(const SampleThresholdArgs& args) {
  if (are_few(args)) {
    if (are_direct(args)) return 0;
    return static_cast<int64_t>(sizeof(uint32_t)) * args.num_segments * args.max_samples;
  }
  return static_cast<int64_t>(sizeof(SegmentState)) * args.num_segments;
}

cudaError_t sample_threshold(const SampleThresholdArgs& args, int64_t numel, void* scratch,
                             cudaStream_t stream) {
  if (args.num_segments == 0) return cudaSuccess;
  return dispatch(args.x_dtype, [&](auto x) {
    using T = decltype(x);
    if (are_few(args)) return run_few<T>(args, numel, static_cast<uint32_t*>(scratch), stream);
    return run_many<T>(args, numel, static_cast<SegmentState*>(scratch), stream);
  });
}

}  // namespace dct::cuda
