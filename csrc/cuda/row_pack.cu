// row_pack.cu -- exact top-k of every row.
//
// A narrow row is held in registers by 8, 16 or 32 lanes, as keys. They look for a threshold that
// exactly k keys reach by bisection, which ends as soon as it is met; only equal keys can prevent
// that, and then the first of them are taken. Wide rows: detail/row_pack_wide.cuh.
#include "detail/launch.cuh"
#include "detail/row_pack_wide.cuh"
#include "detail/vectors.cuh"
#include "row_pack.cuh"

namespace dct::cuda {
namespace {

struct Policy {
  static constexpr int kThreads = 256;
  static constexpr int kMaxWords = 1024;  // of 32 bits, in a narrow row

  // Blocks a multiprocessor: with up to 16 words a thread needs no more than 64 registers, with 32
  // no more than 128.
  static constexpr int min_blocks(int words) { return words <= 16 ? 4 : 2; }
};

// A row among kLanes lanes of a warp; kWarpSize / kLanes rows go side by side.
template <int kLanes>
struct Group {
  static constexpr unsigned kMask = kLanes == kWarpSize ? kFullWarp : (1u << kLanes % 32) - 1;

  __device__ static int lane() { return lane_index() % kLanes; }
  __device__ static unsigned ballot(bool predicate) {
    return __ballot_sync(kFullWarp, predicate) >> (lane_index() - lane()) & kMask;
  }
  __device__ static int sum(int value) {
    if constexpr (kLanes == kWarpSize) {
      return static_cast<int>(__reduce_add_sync(kFullWarp, static_cast<unsigned>(value)));
    }
    return reduce(value, [](int a, int b) { return a + b; });
  }
  template <typename Operation>
  __device__ static int reduce(int value, Operation operation) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      value = operation(value, __shfl_xor_sync(kFullWarp, value, distance));
    }
    return value;
  }
};

template <typename T, int kLanes, bool kAligned, int kWords>
__device__ void load_words(const T* row, int width, uint32_t (&words)[kWords]) {
  constexpr int kStride = kLanes * RowKeys<T>::kPerWord;
  const int first = Group<kLanes>::lane() * RowKeys<T>::kPerWord;
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    words[j] =
        RowKeys<T>::template load<kAligned>(row + first + j * kStride, width - first - j * kStride);
  }
}

template <typename T, int kLanes, int kWords>
__device__ Choice choose(const uint32_t (&words)[kWords], int width, int k) {
  using Keys = RowKeys<T>;
  int own_max = 0;
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
#pragma unroll
    for (int e = 0; e < Keys::kPerWord; ++e) own_max = max(own_max, Keys::key(words[j], e));
  }
  // count(keys >= low) >= k and count(keys >= high) == above < k. Each lane has a key that is at
  // least the smallest of the lanes' largest, so kLanes keys are.
  const auto smaller = [](int a, int b) { return min(a, b); };
  const auto larger = [](int a, int b) { return max(a, b); };
  int low = Group<kLanes>::reduce(own_max, smaller);
  int high = Group<kLanes>::reduce(own_max, larger) + 1;
  int above = 0, reached = -1;  // reached: count(keys >= low), once known
  if (k > kLanes) low = 0;
  if (low == 0) reached = width;
  while (__any_sync(kFullWarp, reached != k && high - low > 1)) {
    const int middle = low + (high - low) / 2;
    const int count = Group<kLanes>::sum(Keys::count(words, middle));
    if (reached == k || high - low <= 1) continue;  // waiting for the other rows of the warp
    if (count >= k) {
      low = middle;
      reached = count;
    } else {
      high = middle;
      above = count;
    }
  }
  if (reached == k) return {low - 1, 0};
  return {low, k - above};
}

// The low 4 bits of x, each followed by a zero.
__device__ unsigned spread_bits(unsigned x) {
  x = (x | x << 2) & 0x33;
  return (x | x << 1) & 0x55;
}

// A lane's columns that are above the cut and equal to it; word j's element e is bit j of mask e.
template <int kPerWord>
struct Masks {
  uint32_t above[kPerWord], equal[kPerWord];
};

template <typename T, int kLanes, int kWords>
__device__ Masks<RowKeys<T>::kPerWord> compare(const uint32_t (&words)[kWords], Choice choice,
                                               int width, bool active) {
  using Keys = RowKeys<T>;
  Masks<Keys::kPerWord> masks = {};
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
#pragma unroll
    for (int e = 0; e < Keys::kPerWord; ++e) {
      const int column = (j * kLanes + Group<kLanes>::lane()) * Keys::kPerWord + e;
      const int key = Keys::key(words[j], e);
      const bool inside = active && column < width;
      masks.above[e] |= uint32_t{inside && key > choice.cut} << j;
      masks.equal[e] |= uint32_t{inside && key == choice.cut} << j;
    }
  }
  return masks;
}

// By a group: stores the chosen columns in order. The loop is not unrolled: its body is long, and
// all it needs of the row is in the masks.
template <int kLanes, int kPerWord>
__device__ void store_chosen(const Masks<kPerWord>& masks, int ties, const PackedRow& packed,
                             int width, bool active) {
  constexpr int kLanesPerByte = 8 / kPerWord;
  const int lane = Group<kLanes>::lane();
  const unsigned below = (1u << lane) - 1;
  const bool any_ties = __any_sync(kFullWarp, ties > 0);
  int above_before = 0, equal_before = 0;  // in the words before
#pragma unroll 1
  for (int j = 0; j * kLanes * kPerWord < width; ++j) {
    const int column = (j * kLanes + lane) * kPerWord;
    int above = above_before, equal = equal_before;  // before this lane's columns
#pragma unroll
    for (int e = 0; e < kPerWord; ++e) {
      const unsigned all_above = Group<kLanes>::ballot(masks.above[e] >> j & 1);
      const unsigned all_equal = any_ties ? Group<kLanes>::ballot(masks.equal[e] >> j & 1) : 0;
      above += __popc(all_above & below);
      equal += __popc(all_equal & below);
      above_before += __popc(all_above);
      equal_before += __popc(all_equal);
    }
    unsigned byte = 0;
#pragma unroll
    for (int e = 0; e < kPerWord; ++e) {
      const bool is_above = masks.above[e] >> j & 1, is_equal = masks.equal[e] >> j & 1;
      const bool chosen = is_above || (is_equal && equal < ties);
      if (chosen) packed.store(above + min(equal, ties), column + e);
      above += is_above;
      equal += is_equal;
      if (!packed.has_bitmap()) continue;
      const unsigned bits = Group<kLanes>::ballot(chosen) >> lane;
      byte |= kPerWord == 1 ? bits : spread_bits(bits & 15) << e;
    }
    if (packed.has_bitmap() && active && lane % kLanesPerByte == 0 && column < width) {
      packed.positions[column / 8] = static_cast<uint8_t>(byte);
    }
  }
}

template <typename T, int kLanes, int kWords>
__global__ void __launch_bounds__(Policy::kThreads, Policy::min_blocks(kWords))
    row_pack_narrow_kernel(RowPackArgs args, bool aligned) {
  constexpr int kRows = Policy::kThreads / kLanes;
  const int64_t row = int64_t{blockIdx.x} * kRows + thread_index() / kLanes;
  const bool active = row < args.rows;
  const int width = static_cast<int>(args.width), k = static_cast<int>(args.k);
  const T* x = static_cast<const T*>(args.x) + (active ? row : 0) * args.width;
  uint32_t words[kWords];
  if (aligned) {
    load_words<T, kLanes, true>(x, width, words);
  } else {
    load_words<T, kLanes, false>(x, width, words);
  }
  const Choice choice = choose<T, kLanes>(words, width, k);
  const auto masks = compare<T, kLanes>(words, choice, width, active);
  store_chosen<kLanes>(masks, static_cast<int>(choice.ties), PackedRow(args, row), width, active);
}

template <typename T, int kLanes, int kWords>
cudaError_t run_narrow(const RowPackArgs& args, cudaStream_t stream) {
  constexpr int kRows = Policy::kThreads / kLanes;
  const int64_t blocks = (args.rows + kRows - 1) / kRows;
  if (blocks > kMaxGrid) return cudaErrorInvalidValue;
  const bool aligned = is_aligned(args.x, 4) && args.width * sizeof(T) % 4 == 0;
  return launch(row_pack_narrow_kernel<T, kLanes, kWords>, dim3(static_cast<unsigned>(blocks)),
                Policy::kThreads, 0, stream, args, aligned);
}

template <typename T>
cudaError_t run(const RowPackArgs& args, cudaStream_t stream) {
  const int64_t words = (args.width + RowKeys<T>::kPerWord - 1) / RowKeys<T>::kPerWord;
  if (words <= 64) return run_narrow<T, 8, 8>(args, stream);
  if (words <= 128) return run_narrow<T, 16, 8>(args, stream);
  if (words <= 256) return run_narrow<T, 32, 8>(args, stream);
  if (words <= 512) return run_narrow<T, 32, 16>(args, stream);
  if (words <= Policy::kMaxWords) return run_narrow<T, 32, 32>(args, stream);
  if (args.rows > kMaxGrid) return cudaErrorInvalidValue;
  return launch(row_pack_wide_kernel<T>, dim3(static_cast<unsigned>(args.rows)), kSelectThreads, 0,
                stream, args);
}

}  // namespace

cudaError_t row_pack(const RowPackArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  return dispatch(args.x_dtype, [&](auto x) { return run<decltype(x)>(args, stream); });
}

}  // namespace dct::cuda
