// row_pack.cu -- exact top-k of every row.
//
// Lanes hold the keys of a row of up to 8,192 columns in registers: part of a warp, a warp, or a
// block of up to eight warps. They bisect for a threshold that exactly k keys reach, and stop when
// they find one. If equal keys prevent that, the lowest columns win. The selection is one bit per
// column. Only these bits, not the keys, are rearranged from striped to blocked order.
// detail/row_pack_wide.cuh handles wider rows.
#include "detail/row_pack_wide.cuh"
#include "detail/scan.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

struct RowPackPolicy {
  // Blocks per multiprocessor: 64 registers are enough for lanes of one warp, 80 for several warps.
  static constexpr int min_blocks(int lanes) { return lanes <= kWarpSize ? 4 : 768 / lanes; }
};
constexpr int kVectorWords = 4;

// The kLanes lanes of a row. A warp has kWarpSize / kLanes rows, or a block has one row.
template <int kLanes>
struct Group {
  static constexpr int kWarpLanes = kLanes < kWarpSize ? kLanes : kWarpSize;
  static constexpr int kRowWarps = kLanes / kWarpLanes;
  struct Shared {
    int partials[2][kWarps];
    ScanStorage<kLanes> scan;
  };
  Shared& shared;
  int turn = 0;

  __device__ static int lane() { return static_cast<int>(threadIdx.x % kLanes); }
  __device__ int added(int value) {
    if constexpr (kLanes < kWarpSize) return reduced(value, sum<int>);
    value = static_cast<int>(__reduce_add_sync(kFullWarp, static_cast<unsigned>(value)));
    return reduce_warps<kRowWarps>(value, sum<int>, shared.partials[turn ^= 1]);
  }
  template <typename Operation>
  __device__ int reduced(int value, Operation operation) {
    value = reduce<kWarpLanes>(value, operation);
    return reduce_warps<kRowWarps>(value, operation, shared.partials[turn ^= 1]);
  }
  __device__ int added_below(int value) {  // exclusive prefix sum
    return scan<kLanes>(value, Sum{}, shared.scan).exclusive;
  }
};

// Loads the columns of the row that a warp holds: vectors of four words in striped order. Word c of
// vector j of a lane is word 4 * (j * kLanes + lane) + c of these columns.
template <typename T, int kLanes, int kWords>
__device__ void load_words(const T* row, int width, bool aligned, uint32_t (&words)[kWords]) {
  using Keys = RowKeys<T>;
  constexpr int kColumns = kVectorWords * Keys::kPerWord, kStride = kLanes * kColumns;
  const int lane = static_cast<int>(threadIdx.x % kLanes);
  const T* base = row + lane * kColumns;
  const int left = width - lane * kColumns;
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
__device__ void bisect(const uint32_t (&words)[kWords], int k, Group<kLanes>& group, int& low,
                       int& high, int& above) {
  while (true) {
    const bool open = high - low > 1;
    if (!__any_sync(kFullWarp, open)) return;
    const int middle = low + (high - low) / 2;
    const int count = group.added(Keys::count(words, middle));
    if (!open) continue;  // other rows of the warp still search; a block has one row
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
__device__ void search(const uint32_t (&words)[kWords], int k, Group<kLanes>& group, int& low,
                       int& high, int& above) {
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
  low = min(group.reduced(least, smaller), Keys::kInfinity);
  high = min(group.reduced(largest[0], larger<int>), Keys::kInfinity) + 1;
  above = 0;
  bisect<Keys>(words, k, group, low, high, above);
}

template <typename T, int kLanes, int kWords>
__device__ TopK select_top_k(const uint32_t (&words)[kWords], int k, Group<kLanes>& group) {
  using Keys = RowKeys<T>;
  int low, high, above;
  if constexpr (Keys::kPerWord == 2) {
    search<Keys>(words, k, group, low, high, above);
  } else {
    // First searches only the upper halves of the keys, two per word. They often suffice.
    uint32_t halves[kWords / 2];
#pragma unroll
    for (int j = 0; j < kWords / 2; ++j) halves[j] = Keys::halves(words[2 * j], words[2 * j + 1]);
    search<RowKeys<BFloat16>>(halves, k, group, low, high, above);
    high = min(high << 16, Keys::kInfinity + 1);
    low = above == k ? high - 1 : low << 16;
    bisect<Keys>(words, k, group, low, high, above);
  }
  return {low, k - above};
}

// Converts striped to blocked order in a warp: bit i of the result is column lane * kWords *
// kPerWord + i.
template <int kLanes, int kWords, int kPerWord>
__device__ uint32_t striped_to_blocked(uint32_t mask) {
  constexpr int kVectors = kWords / kVectorWords, kColumns = kVectorWords * kPerWord;
  const int lane = static_cast<int>(threadIdx.x % kLanes);
  const int first = lane * kVectors;  // vector index in the columns of the warp
  const int shift = lane * kVectors / kLanes * kColumns;
  uint32_t result = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint32_t other =
        __shfl_sync(kFullWarp, mask, first + i, kLanes) >> (shift + i / kLanes * kColumns);
    result |= (other & ((1u << kColumns) - 1)) << (i * kColumns);
  }
  return result;
}

// The mask of the selected columns, in blocked order. Columns past the row have key 0 and are never
// selected, because the lowest columns win ties.
template <typename T, int kLanes, int kWords>
__device__ uint32_t selected_columns(const uint32_t (&words)[kWords], TopK top_k,
                                     Group<kLanes>& group) {
  using Keys = RowKeys<T>;
  constexpr auto to_blocked = striped_to_blocked<Group<kLanes>::kWarpLanes, kWords, Keys::kPerWord>;
  // No key ranks above infinity, not even the key of a NaN.
  const bool infinite = top_k.threshold == Keys::kInfinity;
  const uint32_t above_from =
      infinite ? 1u << Keys::kBits : static_cast<uint32_t>(top_k.threshold + 1);
  const uint32_t above = Keys::reaching(words, above_from);
  uint32_t selected = to_blocked(above);
  if (__any_sync(kFullWarp, top_k.ties > 0)) {
    const uint32_t equal =
        Keys::reaching(words, static_cast<uint32_t>(max(top_k.threshold, 0))) & ~above;
    uint32_t tied = to_blocked(equal);
    const int before = group.added_below(__popc(tied));
    for (int left = static_cast<int>(top_k.ties) - before; left > 0 && tied != 0; --left) {
      selected |= tied & -tied;
      tied &= tied - 1;
    }
  }
  return selected;
}

template <typename T, int kLanes, int kWords>
__global__ void __launch_bounds__(kRowThreads<kLanes>, RowPackPolicy::min_blocks(kLanes))
    row_pack_narrow_kernel(RowPackArgs args, bool aligned) {
  using RowGroup = Group<kLanes>;
  constexpr int kRows = kRowThreads<kLanes> / kLanes;
  constexpr int kColumns = kWords * RowKeys<T>::kPerWord;
  __shared__ typename RowGroup::Shared shared;
  RowGroup group = {shared};
  const int64_t row = int64_t{blockIdx.x} * kRows + thread_index() / kLanes;
  const bool active = row < args.rows;
  const int width = static_cast<int>(args.width), k = static_cast<int>(args.k);
  const T* x = static_cast<const T*>(args.x) + (active ? row : 0) * args.width;
  const int first = RowGroup::lane() * kColumns;
  const int skipped = first - first % (RowGroup::kWarpLanes * kColumns);  // columns of other warps
  uint32_t words[kWords];
  load_words<T, RowGroup::kWarpLanes>(x + skipped, width - skipped, aligned, words);
  const TopK top_k = select_top_k<T>(words, k, group);
  uint32_t selected = selected_columns<T>(words, top_k, group);
  int slot = group.added_below(__popc(selected));
  if (!active) return;

  const PackedRow packed(args, row);
  if (packed.has_bitmap()) {
#pragma unroll
    for (int b = 0; b < kColumns; b += 8) {
      if (first + b < width) {
        packed.positions[(first + b) / 8] = static_cast<uint8_t>(selected >> b);
      }
    }
  }
  for (x += first; selected != 0; selected &= selected - 1) {
    const int column = __ffs(static_cast<int>(selected)) - 1;
    packed.store(slot++, first + column, to_float(x[column]));
  }
}

template <typename T, int kLanes, int kWords>
cudaError_t run_narrow(const RowPackArgs& args, cudaStream_t stream) {
  constexpr int kBlockThreads = kRowThreads<kLanes>, kRows = kBlockThreads / kLanes;
  const int64_t blocks = (args.rows + kRows - 1) / kRows;
  const bool aligned = is_aligned(args.x, 16) && args.width * sizeof(T) % 16 == 0;
  return launch(row_pack_narrow_kernel<T, kLanes, kWords>, blocks, kBlockThreads, 0, stream, args,
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
  if (args.width <= 2048) return run_narrow<T, 64, kWords>(args, stream);
  if (args.width <= 4096) return run_narrow<T, 128, kWords>(args, stream);
  if (args.width <= 8192) return run_narrow<T, 256, kWords>(args, stream);
  return launch(row_pack_wide_kernel<T>, args.rows, kThreads, 0, stream, args);
}

}  // namespace

cudaError_t row_pack(const RowPackArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  return dispatch(args.x_dtype, [&](auto x) { return run<decltype(x)>(args, stream); });
}

}  // namespace dct::cuda
