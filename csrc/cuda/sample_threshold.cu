// sample_threshold.cu -- a radix select over the picks of every segment, three digits of the 31-bit
// magnitude, the highest first.
//
// Each pass is one kernel: the blocks of a segment count the current digit of the picks whose
// higher digits are those found so far; the last of them to finish finds the digit that the k-th
// largest has. Picks are read again in each pass rather than kept: they are few, and in the cache
// by then.
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
  static constexpr int kThreads = kSelectThreads, kMinBlocks = 4;
  static constexpr int kInFlight = 4;  // picks that a thread reads before it counts them
  // Blocks of a segment: one for so many picks, but not more than fill the device.
  static constexpr int kPicks = kThreads * kInFlight;
  static constexpr int kMaxBlocks = 2048, kMinPerSegment = 8;
};

using MagnitudeDigits = Digits<31>;
constexpr int kPasses = MagnitudeDigits::kPasses;

struct SegmentState {
  uint32_t histogram[kBins];
  uint32_t prefix;         // the digits found so far
  uint32_t rank;           // the k-th largest is the rank-th largest of those with this prefix
  unsigned done[kPasses];  // blocks that have counted
};

struct Shared {
  uint32_t histogram[kBins];
  SelectStorage select;
  bool last;
};

struct Segment {
  int64_t index, begin, numel, picks;
  int64_t blocks, block;  // that count it, and which of them this is
};

__device__ Segment find_segment(const SampleThresholdArgs& args, int64_t numel, int per_segment) {
  Segment segment;
  segment.index = blockIdx.x / per_segment;
  segment.block = blockIdx.x % per_segment;
  segment.begin = min(max(args.segments[segment.index], int64_t{0}), numel);
  const int64_t end = min(args.segments[segment.index + 1], numel);
  segment.numel = max(end, segment.begin) - segment.begin;
  segment.picks = min(segment.numel, args.max_samples);
  segment.blocks = (segment.picks + Policy::kPicks - 1) / Policy::kPicks;
  segment.blocks = min(max(segment.blocks, int64_t{1}), int64_t{per_segment});
  return segment;
}

__device__ int64_t place_of(const SampleThresholdArgs& args, const Segment& segment, int64_t pick) {
  if (segment.picks == segment.numel) return segment.begin + pick;
  return segment.begin + stratified_pick(pick, segment.numel, segment.picks, args.seed,
                                         static_cast<uint32_t>(segment.index));
}

// All places are known before the first is read, and all are read before the first key is made.
// Past the end the last pick is read again.
template <typename T>
__device__ void count(const SampleThresholdArgs& args, const Segment& segment, Digit digit,
                      uint32_t prefix, uint32_t* histogram) {
  const float scale = args.inv_scale != nullptr ? *args.inv_scale : 1.0f;
  const int64_t stride = segment.blocks * Policy::kThreads;
  const int64_t first = segment.block * Policy::kThreads + thread_index();
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

__device__ uint32_t first_rank(double density, int64_t picks) {
  const double wanted = ceil(__dmul_rn(density, static_cast<double>(picks)));
  return static_cast<uint32_t>(min(max(wanted, 1.0), static_cast<double>(picks)));
}

template <typename T>
__global__ void __launch_bounds__(Policy::kThreads, Policy::kMinBlocks)
    sample_threshold_kernel(SampleThresholdArgs args, int64_t numel, int per_segment,
                            SegmentState* states, int pass) {
  DCT_SHARED(Shared, shared);
  const Segment segment = find_segment(args, numel, per_segment);
  if (segment.block >= segment.blocks) return;
  if (segment.picks == 0) {
    if (thread_index() == 0) args.threshold[segment.index] = bits_to_float(kFloat32Infinity);
    return;
  }
  const Digit digit = MagnitudeDigits::at(pass);
  SegmentState& state = states[segment.index];
  const uint32_t prefix = state.prefix;  // zero in the first pass, as cleared
  const uint32_t rank = pass == 0 ? first_rank(args.density, segment.picks) : state.rank;

  for (int b = thread_index(); b < kBins; b += Policy::kThreads) shared.histogram[b] = 0;
  __syncthreads();
  count<T>(args, segment, digit, prefix, shared.histogram);
  __syncthreads();
  for (int b = thread_index(); b < kBins; b += Policy::kThreads) {
    if (shared.histogram[b] > 0) atomicAdd(&state.histogram[b], shared.histogram[b]);
  }
  __syncthreads();
  if (thread_index() == 0) {
    const unsigned blocks = static_cast<unsigned>(segment.blocks);
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
cudaError_t run(const SampleThresholdArgs& args, int64_t numel, SegmentState* states,
                cudaStream_t stream) {
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
  return static_cast<int64_t>(sizeof(SegmentState)) * args.num_segments;
}

cudaError_t sample_threshold(const SampleThresholdArgs& args, int64_t numel, void* scratch,
                             cudaStream_t stream) {
  if (args.num_segments == 0) return cudaSuccess;
  const cudaError_t cleared =
      cudaMemsetAsync(scratch, 0, sample_threshold_scratch_bytes(args), stream);
  if (cleared != cudaSuccess) return cleared;
  return dispatch(args.x_dtype, [&](auto x) {
    return run<decltype(x)>(args, numel, static_cast<SegmentState*>(scratch), stream);
  });
}

}  // namespace dct::cuda
