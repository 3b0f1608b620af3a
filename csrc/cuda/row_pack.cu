// row_pack.cu -- exact top-k of every row.
//
// 4 to 32 lanes hold the keys of a narrow row in registers. They bisect for a threshold that
// exactly k keys reach, and stop when they find one. If equal keys prevent that, the lowest columns
// win. The selection is one bit per column. Only these bits, not the keys, are rearranged from
// striped to blocked order. detail/row_pack_wide.cuh handles wide rows.
#include "detail/device.cuh"
#include "detail/row_pack_wide.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

struct RowPackPolicy {
  // Blocks per multiprocessor: 64 registers are enough for 32 columns per thread, 80 for 64.
  static constexpr int min_blocks(int columns) { return columns <= 32 ? 4 : 3; }
};
constexpr int kVectorWords = 4;

// The kLanes lanes of a row. A warp has kWarpSize / kLanes rows.
template <int kLanes>
struct Group {
  __device__ static int lane() { return static_cast<int>(threadIdx.x % kLanes); }
  template <typename T>
  __device__ static T from(T value, int lane) {  // lane modulo kLanes
    return __shfl_sync(kFullWarp, value, (lane_index() & ~(kLanes - 1)) | (lane & (kLanes - 1)));
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
  // Exclusive prefix sum.
  __device__ static int sum_below(int value) {
    int sum = value;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const int below = __shfl_up_sync(kFullWarp, sum, distance);
      if (lane() >= distance) sum += below;
    }
    return sum - value;
  }
};

// Loads vectors of four words in striped order: word c of vector j of a lane is word 4 * (j *
// kLanes + lane) + c of the row.
template <typename T, int kLanes, int kWords>
__device__ void load_words(const T* row, int width, bool aligned, uint32_t (&words)[kWords]) {
  using Keys = RowKeys<T>;
  constexpr int kColumns = kVectorWords * Keys::kPerWord, kStride = kLanes * kColumns;
  const T* base = row + Group<kLanes>::lane() * kColumns;
  const int left = width - Group<kLanes>::lane() * kColumns;
  if (aligned) {
    uint4 vectors[kWords / kVectorWords];
#pragma unroll
    for (int j = 0; j < kWords / kVectorWords; ++j) {
      vectors[j] = make_uint4(0, 0, 0, 0);
      if (left > j * kStride) vectors[j] = *reinterpret_cast<const uint4*>(base + j * kStride);
    }
#pragma unroll
    for (int j = 0; j < kWords / kVectorWords; ++j) {
      words[4 * j] = Keys::word(vectors[j].x);
      words[4 * j + 1] = Keys::word(vectors[j].y);
      words[4 * j + 2] = Keys::word(vectors[j].z);
      words[4 * j + 3] = Keys::word(vectors[j].w);
    }
  } else {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int at = w / kVectorWords * kStride + w % kVectorWords * Keys::kPerWord;
      words[w] = Keys::load(base + at, left - at);
    }
  }
}

// Narrows [low, high) until it contains one value, or until exactly k keys reach `high`. In the
// second case, only keys above `low` are selected. Invariant until then: at least k keys reach
// `low`, and `above` keys, fewer than k, reach `high`.
template <typename Keys, int kLanes, int kWords>
__device__ void bisect(const uint32_t (&words)[kWords], int k, int& low, int& high, int& above) {
  while (true) {
    const bool open = high - low > 1;
    if (!__any_sync(kFullWarp, open)) return;
    const int middle = low + (high - low) / 2;
    const int count = Group<kLanes>::sum(Keys::count(words, middle));
    if (!open) continue;  // other rows of the warp still search
    if (count > k) {
      low = middle;
    } else {
      high = middle;
      above = count;
      if (count == k) low = middle - 1;
    }
  }
}

// As bisect, but computes the initial bounds.
template <typename Keys, int kLanes, int kWords>
__device__ void search(const uint32_t (&words)[kWords], int k, int& low, int& high, int& above) {
  int largest[kKeyGroups];  // per group of keys of a lane
  Keys::largest(words, largest);
  // The initial `low` is the least of the groups' largest keys, so at least one key per group
  // reaches it. Larger groups make it higher. There must be more than k groups: if exactly k keys
  // reached `low`, the search would end late.
  int least = 0;
#pragma unroll
  for (int groups = kKeyGroups; groups > 0; groups /= 2) {
    if (groups < kKeyGroups) {
#pragma unroll
      for (int g = 0; g < groups; ++g) largest[g] = max(largest[g], largest[groups + g]);
    }
    if (k < groups * kLanes) {
      least = largest[0];
#pragma unroll
      for (int g = 1; g < groups; ++g) least = min(least, largest[g]);
    }
  }
  const auto smaller = [](int a, int b) { return min(a, b); };
  const auto larger = [](int a, int b) { return max(a, b); };
  low = min(Group<kLanes>::reduce(least, smaller), Keys::kInfinity);
  high = min(Group<kLanes>::reduce(largest[0], larger), Keys::kInfinity) + 1;
  above = 0;
  bisect<Keys, kLanes>(words, k, low, high, above);
}

template <typename T, int kLanes, int kWords>
__device__ TopK select_top_k(const uint32_t (&words)[kWords], int k) {
  using Keys = RowKeys<T>;
  int low, high, above;
  if constexpr (Keys::kPerWord == 2) {
    search<Keys, kLanes>(words, k, low, high, above);
  } else {
    // First searches only the upper halves of the keys, two per word. They often suffice.
    uint32_t halves[kWords / 2];
#pragma unroll
    for (int j = 0; j < kWords / 2; ++j) halves[j] = Keys::halves(words[2 * j], words[2 * j + 1]);
    search<RowKeys<BFloat16>, kLanes>(halves, k, low, high, above);
    high = min(high << 16, Keys::kInfinity + 1);
    low = above == k ? high - 1 : low << 16;
    bisect<Keys, kLanes>(words, k, low, high, above);
  }
  return {low, k - above};
}

// Converts striped to blocked order: bit i of the result is column lane * kWords * kPerWord + i.
template <int kLanes, int kWords, int kPerWord>
__device__ KeyMask<kWords * kPerWord> striped_to_blocked(KeyMask<kWords * kPerWord> mask) {
  constexpr int kVectors = kWords / kVectorWords, kColumns = kVectorWords * kPerWord;
  const int first = Group<kLanes>::lane() * kVectors;  // vector index in the row
  const int shift = static_cast<int>(threadIdx.x % kLanes * kVectors / kLanes) * kColumns;
  KeyMask<kWords * kPerWord> result = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const auto other = Group<kLanes>::from(mask, first + i) >> (shift + i / kLanes * kColumns);
    result |= (other & ((1u << kColumns) - 1)) << (i * kColumns);
  }
  return result;
}

template <typename Mask>
__device__ int count_bits(Mask mask) {
  if constexpr (sizeof(Mask) == 8) {
    return __popc(static_cast<uint32_t>(mask)) + __popc(static_cast<uint32_t>(mask >> 32));
  }
  return __popc(static_cast<uint32_t>(mask));
}
template <typename Mask>
__device__ int lowest_bit(Mask mask) {
  const auto low = static_cast<int>(mask);
  if constexpr (sizeof(Mask) == 8) {
    if (low == 0) return 31 + __ffs(static_cast<int>(mask >> 32));
  }
  return __ffs(low) - 1;
}

// The mask of the selected columns, in blocked order. Columns past the row have key 0 and are never
// selected, because the lowest columns win ties.
template <typename T, int kLanes, int kWords>
__device__ auto selected_columns(const uint32_t (&words)[kWords], TopK top_k) {
  using Keys = RowKeys<T>;
  // No key ranks above infinity, not even the key of a NaN.
  const bool infinite = top_k.threshold == Keys::kInfinity;
  const uint32_t above_from =
      infinite ? 1u << Keys::kBits : static_cast<uint32_t>(top_k.threshold + 1);
  const auto above = Keys::reaching(words, above_from);
  auto selected = striped_to_blocked<kLanes, kWords, Keys::kPerWord>(above);
  if (__any_sync(kFullWarp, top_k.ties > 0)) {
    const auto equal =
        Keys::reaching(words, static_cast<uint32_t>(max(top_k.threshold, 0))) & ~above;
    auto tied = striped_to_blocked<kLanes, kWords, Keys::kPerWord>(equal);
    const int before = Group<kLanes>::sum_below(count_bits(tied));
    for (int left = static_cast<int>(top_k.ties) - before; left > 0 && tied != 0; --left) {
      selected |= tied & -tied;
      tied &= tied - 1;
    }
  }
  return selected;
}

template <typename T, int kLanes, int kWords>
__global__ void __launch_bounds__(kThreads, RowPackPolicy::min_blocks(kWords* RowKeys<T>::kPerWord))
    row_pack_narrow_kernel(RowPackArgs args, bool aligned) {
  constexpr int kRows = kThreads / kLanes, kColumns = kWords * RowKeys<T>::kPerWord;
  const int64_t row = int64_t{blockIdx.x} * kRows + thread_index() / kLanes;
  const bool active = row < args.rows;
  const int width = static_cast<int>(args.width), k = static_cast<int>(args.k);
  const T* x = static_cast<const T*>(args.x) + (active ? row : 0) * args.width;
  uint32_t words[kWords];
  load_words<T, kLanes>(x, width, aligned, words);
  auto selected = selected_columns<T, kLanes>(words, select_top_k<T, kLanes>(words, k));
  int slot = Group<kLanes>::sum_below(count_bits(selected));
  if (!active) return;

  const PackedRow packed(args, row);
  const int first = Group<kLanes>::lane() * kColumns;
  if (packed.has_bitmap()) {
#pragma unroll
    for (int b = 0; b < kColumns; b += 8) {
      if (first + b < width) {
        packed.positions[(first + b) / 8] = static_cast<uint8_t>(selected >> b);
      }
    }
  }
  for (x += first; selected != 0; selected &= selected - 1) {
    const int column = lowest_bit(selected);
    packed.store(slot++, first + column, to_float(x[column]));
  }
}

template <typename T, int kLanes, int kWords>
cudaError_t run_narrow(const RowPackArgs& args, cudaStream_t stream) {
  constexpr int kRows = kThreads / kLanes;
  const int64_t blocks = (args.rows + kRows - 1) / kRows;
  const bool aligned = is_aligned(args.x, 16) && args.width * sizeof(T) % 16 == 0;
  return launch(row_pack_narrow_kernel<T, kLanes, kWords>, blocks, kThreads, 0, stream, args,
                aligned);
}

// With 32 columns per lane, the cost per lane is small, and the mask of a lane is one word.
template <typename T>
cudaError_t run(const RowPackArgs& args, cudaStream_t stream) {
  constexpr int kWords = 32 / RowKeys<T>::kPerWord;
  if (args.width <= 64) return run_narrow<T, 4, kWords / 2>(args, stream);
  if (args.width <= 128) return run_narrow<T, 4, kWords>(args, stream);
  if (args.width <= 256) return run_narrow<T, 8, kWords>(args, stream);
  if (args.width <= 512) return run_narrow<T, 16, kWords>(args, stream);
  if (args.width <= 1024) return run_narrow<T, 32, kWords>(args, stream);
  if constexpr (RowKeys<T>::kPerWord == 2) {
    if (args.width <= 2048) return run_narrow<T, 32, 2 * kWords>(args, stream);
  }
  return launch(row_pack_wide_kernel<T>, args.rows, kThreads, 0, stream, args);
}

}  // namespace

cudaError_t row_pack(const RowPackArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  return dispatch(args.x_dtype, [&](auto x) { return run<decltype(x)>(args, stream); });
}

}  // namespace dct::cuda
