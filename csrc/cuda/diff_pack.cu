// diff_pack.cu -- packs the entries whose bits differ, in two kernels; and checksums.
//
// In the first kernel, a thread block compares one block of 4,096 entries, and reads every entry
// once. It writes the numbers of the block to the patch, and the words to the block's slot in
// scratch memory if they fit. When the second kernel runs, all numbers are known. Each of its warps
// copies the slots of consecutive blocks to the patch. It compares a block again if its words did
// not fit. No thread block waits for another.
#include "detail/patch_blocks.cuh"
#include "kernels.cuh"

namespace dct::cuda {
namespace {

constexpr int kEight = 8;                         // adjacent entries of a lane, 16 bytes
constexpr int kWarpEntries = kWarpSize * kEight;  // that a warp loads at once
constexpr int kHalves = 2;                        // such loads of each warp per block
static_assert(kPatchBlock == kWarps * kHalves * kWarpEntries, "a thread block loads a block");

// At most 80 registers per thread in the first kernel, and 64 in the second.
constexpr int kStageMinBlocks = 3, kPlaceMinBlocks = 4;
// A slot holds one and a half times a block's share of the capacity, and a few words more.
constexpr int64_t kMoreInSlot = 32;

struct Slots {
  uint16_t* words;  // [blocks, capacity]
  uint32_t capacity;
};

// The bits of eight entries, packed in pairs.
struct Eight {
  uint32_t pairs[kEight / 2];

  __device__ uint32_t entry(int e) const { return pairs[e / 2] >> (16 * (e % 2)) & 0xffff; }
};

struct Compared {
  Eight now, before;
  uint32_t changed, full;  // bit masks

  // The numbers of entries (in the low 16 bits) and of full values.
  __device__ uint32_t counts() const { return __popc(changed) | __popc(full) << 16; }
};

// The bits of a weight. Half is the dtype of a rounded float32.
template <typename Half, typename Weight>
__device__ uint32_t bits_of(Weight x) {
  if constexpr (sizeof(x) == sizeof(uint16_t)) return x;
  return round_to<Half>(x).bits;
}

// Loads the bits of eight entries from `index` on. With kWhole, there are eight at a multiple of 16
// bytes. Otherwise, entries past `numel` are 0.
template <typename Half, bool kWhole, typename Weight>
__device__ void load_eight(const Weight* x, int64_t index, int64_t numel, Eight& bits) {
  if constexpr (kWhole && sizeof(Weight) == sizeof(uint16_t)) {
    stream_in(reinterpret_cast<const uint32_t*>(x + index), bits.pairs);
  } else {
    Weight loaded[2][kEight / 2];
    if constexpr (kWhole) {
      stream_in(x + index, loaded[0]);
      stream_in(x + index + kEight / 2, loaded[1]);
    }
#pragma unroll
    for (int e = 0; e < kEight; e += 2) {
      Weight* pair = loaded[e / 4] + e % 4;
#pragma unroll
      for (int i = 0; i < 2 && !kWhole; ++i) {
        pair[i] = index + e + i < numel ? x[index + e + i] : Weight{0};
      }
      bits.pairs[e / 2] = bits_of<Half>(pair[0]) | bits_of<Half>(pair[1]) << 16;
    }
  }
}

// Loads a lane's groups of eight entries, which are kWarpEntries apart. The snapshot may be
// nullptr. `whole`: whether all entries of the block exist, at a multiple of 16 bytes. The function
// branches once, so that all loads are in flight together.
template <typename Half, typename Weight, typename Snapshot, int kCount>
__device__ void load(const Weight* weights, Snapshot snapshot, int64_t index, int64_t numel,
                     bool whole, Compared (&x)[kCount]) {
  const auto load_all = [&](auto is_whole) {
    constexpr bool kWhole = decltype(is_whole)::value;
#pragma unroll
    for (int h = 0; h < kCount; ++h) {
      const int64_t at = index + h * kWarpEntries;
      if constexpr (!std::is_null_pointer_v<Snapshot>) {
        load_eight<Half, kWhole>(snapshot, at, numel, x[h].before);
      }
      load_eight<Half, kWhole>(weights, at, numel, x[h].now);
    }
  };
  if (whole) {
    load_all(std::true_type{});
  } else {
    load_all(std::false_type{});
  }
}

// The position in a block of a lane's first entry, if a thread block loads the block.
__device__ int lane_position() {
  return warp_index() * kHalves * kWarpEntries + lane_index() * kEight;
}

// Adds the hashes of this thread block's entries to a checksum. Call it with other `warp_sums` than
// before.
__device__ void add_hashes(const Compared (&x)[kHalves], Eight Compared::* bits, int64_t numel,
                           int64_t* checksum, Word (&warp_sums)[kWarps]) {
  const int64_t block = blockIdx.x;
  Word hashes = 0;
#pragma unroll
  for (int g = 0; g < kHalves * kEight / kHashed; ++g) {
    const uint32_t* pair = (x[g / 2].*bits).pairs + 2 * (g % 2);
    const int position = lane_position() + g / 2 * kWarpEntries + g % 2 * kHashed;
    if (block * kPatchBlock + position >= numel) continue;
    hashes += group_hash(pair[0] | Word{pair[1]} << 32, position / kHashed);
  }
  hashes = reduce_warps<kWarps>(warp_sum(hashes), sum<Word>, warp_sums);
  if (thread_index() == 0) {
    atomicAdd(reinterpret_cast<Word*>(checksum), hashes * block_factor(block));
  }
}

__global__ void __launch_bounds__(kThreads) checksum_kernel(ChecksumArgs args, bool aligned) {
  __shared__ Word warp_sums[kWarps];
  const int64_t begin = int64_t{blockIdx.x} * kPatchBlock;
  Compared x[kHalves];
  load<BFloat16>(args.weights, nullptr, begin + lane_position(), args.numel,
                 aligned && begin + kPatchBlock <= args.numel, x);
  add_hashes(x, &Compared::now, args.numel, args.checksum, warp_sums);
}

__device__ BlockNumbers* numbers_of(const DiffPackArgs& args) {
  return reinterpret_cast<BlockNumbers*>(args.patch + sizeof(PayloadHeader));
}

__device__ void compare(Compared& x) {
  x.changed = x.full = 0;
#pragma unroll
  for (int e = 0; e < kEight; ++e) {
    const uint32_t now = x.now.entry(e), before = x.before.entry(e);
    x.changed |= uint32_t{now != before} << e;
    x.full |= uint32_t{step_code(now, before) == kFullValue} << e;
  }
}

// Writes the words of a lane. `preceding` are the counts of the preceding lanes of the block,
// `entries` is the number of entries of the block. Words from `limit` on are not written.
__device__ void put(const Compared& x, uint32_t position, uint32_t preceding, uint32_t entries,
                    uint16_t* words, uint32_t limit) {
  if (x.changed == 0) return;
  uint32_t entry = preceding & 0xffff, value = entries + (preceding >> 16);
#pragma unroll
  for (int e = 0; e < kEight; ++e) {
    if ((x.changed >> e & 1) == 0) continue;
    const uint32_t code = step_code(x.now.entry(e), x.before.entry(e));
    if (entry < limit) words[entry] = static_cast<uint16_t>((position + e) << 4 | code);
    ++entry;
    if (code != kFullValue) continue;
    if (value < limit) words[value] = static_cast<uint16_t>(x.now.entry(e));
    ++value;
  }
}

template <typename Half, typename Weight>
__global__ void __launch_bounds__(kThreads, kStageMinBlocks)
    diff_pack_stage_kernel(DiffPackArgs args, Slots slots, bool aligned) {
  __shared__ uint32_t warp_counts[kWarps];
  __shared__ Word old_sums[kWarps], new_sums[kWarps];
  const int64_t block = blockIdx.x, begin = block * kPatchBlock;
  Compared x[kHalves];
  load<Half>(static_cast<const Weight*>(args.weights), args.snapshot, begin + lane_position(),
             args.numel, aligned && begin + kPatchBlock <= args.numel, x);
  if (args.checksums != nullptr) {
    add_hashes(x, &Compared::before, args.numel, args.checksums, old_sums);
    add_hashes(x, &Compared::now, args.numel, args.checksums + 1, new_sums);
  }
  uint32_t preceding[kHalves], counts = 0;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    compare(x[h]);
    const uint32_t inclusive = warp_inclusive_sum(x[h].counts());
    preceding[h] = counts + inclusive - x[h].counts();
    counts += __shfl_sync(kFullWarp, inclusive, kWarpSize - 1);
  }
  if (lane_index() == 0) warp_counts[warp_index()] = counts;
  __syncthreads();
  uint32_t all = 0, lower = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp_index()) lower = all;
    all += warp_counts[w];
  }
  const uint32_t entries = all & 0xffff, words = entries + (all >> 16);
  if (thread_index() == 0) {
    numbers_of(args)[block] = {static_cast<uint16_t>(entries), static_cast<uint16_t>(words)};
  }
  if (words > slots.capacity) return;
  uint16_t* slot = slots.words + block * slots.capacity;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int position = lane_position() + h * kWarpEntries;
    put(x[h], position, lower + preceding[h], entries, slot, words);
  }
}

// Compares a block again. By one warp.
template <typename Half, typename Weight>
__device__ void pack_block(const DiffPackArgs& args, int64_t begin, bool aligned, uint32_t entries,
                           uint16_t* words, uint32_t limit) {
  const bool whole = aligned && begin + kPatchBlock <= args.numel;
  uint32_t counts = 0;
  for (int first = 0; first < kPatchBlock; first += kWarpEntries) {
    const int position = first + lane_index() * kEight;
    Compared x[1];
    load<Half>(static_cast<const Weight*>(args.weights), args.snapshot, begin + position,
               args.numel, whole, x);
    compare(x[0]);
    const uint32_t inclusive = warp_inclusive_sum(x[0].counts());
    put(x[0], position, counts + inclusive - x[0].counts(), entries, words, limit);
    counts += __shfl_sync(kFullWarp, inclusive, kWarpSize - 1);
  }
}

template <typename Half, typename Weight>
__global__ void __launch_bounds__(kThreads, kPlaceMinBlocks)
    diff_pack_place_kernel(DiffPackArgs args, PatchGrid grid, Slots slots, bool aligned) {
  const BlockNumbers* numbers = numbers_of(args);
  auto* const words = reinterpret_cast<uint16_t*>(args.patch + patch_words_offset(args.numel));
  Word at = words_before(numbers, grid);
  const int64_t first = grid.first_of(warp_index()), last = grid.first_of(warp_index() + 1);
  BlockNumbers next = first < last ? numbers[first] : BlockNumbers{};
  for (int64_t b = first; b < last; ++b) {
    const BlockNumbers n = next;
    if (b + 1 < last) next = numbers[b + 1];  // loaded while the words of this block are copied
    const Word capacity = args.capacity, room = capacity - min(at, capacity);
    const auto limit = static_cast<uint32_t>(min(room, Word{n.words}));
    if (n.words > slots.capacity) {
      pack_block<Half, Weight>(args, b * kPatchBlock, aligned, n.entries, words + at, limit);
    } else {
      const uint16_t* slot = slots.words + b * slots.capacity;
#pragma unroll 4
      for (uint32_t i = lane_index(); i < limit; i += kWarpSize) words[at + i] = slot[i];
    }
    at += n.words;
  }
  // The end of the last warp is the end of the patch.
  if (blockIdx.x + 1 == gridDim.x && warp_index() == kWarps - 1 && lane_index() == 0) {
    *reinterpret_cast<PayloadHeader*>(args.patch) =
        patch_header(args.numel, args.capacity, args.dtype, at);
  }
}

template <typename Half, typename Weight>
cudaError_t run(const DiffPackArgs& args, const Slots& slots, cudaStream_t stream) {
  const bool aligned =
      is_aligned(args.weights, kVectorBytes) && is_aligned(args.snapshot, kVectorBytes);
  const PatchGrid grid(args.numel);
  if (grid.blocks > 0) {
    const cudaError_t staged = launch(diff_pack_stage_kernel<Half, Weight>, grid.blocks, kThreads,
                                      0, stream, args, slots, aligned);
    if (staged != cudaSuccess) return staged;
  }
  return launch(diff_pack_place_kernel<Half, Weight>, grid.thread_blocks, kThreads, 0, stream, args,
                grid, slots, aligned);
}

uint32_t slot_capacity(const DiffPackArgs& args) {
  const int64_t blocks = patch_blocks(args.numel);
  const int64_t share = blocks > 0 ? ceil_div(args.capacity, blocks) : 0;
  return static_cast<uint32_t>(min(share + share / 2 + kMoreInSlot, kMostBlockWords) / 8 * 8);
}

}  // namespace

int64_t diff_pack_scratch_bytes(const DiffPackArgs& args) {
  return patch_blocks(args.numel) * slot_capacity(args) * int64_t{sizeof(uint16_t)};
}

cudaError_t diff_pack(const DiffPackArgs& args, void* scratch, cudaStream_t stream) {
  const Slots slots = {static_cast<uint16_t*>(scratch), slot_capacity(args)};
  if (args.checksums != nullptr) {
    const cudaError_t cleared =
        cudaMemsetAsync(args.checksums, 0, 2 * sizeof(*args.checksums), stream);
    if (cleared != cudaSuccess) return cleared;
  }
  if (args.weights_dtype != DType::kFloat32) {
    return run<BFloat16, uint16_t>(args, slots, stream);  // compares bits of any dtype
  }
  return args.dtype == DType::kBFloat16 ? run<BFloat16, float>(args, slots, stream)
                                        : run<Float16, float>(args, slots, stream);
}

cudaError_t checksum(const ChecksumArgs& args, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(args.checksum, 0, sizeof(*args.checksum), stream);
  const int64_t blocks = patch_blocks(args.numel);
  if (cleared != cudaSuccess || blocks == 0) return cleared;
  return launch(checksum_kernel, blocks, kThreads, 0, stream, args,
                is_aligned(args.weights, kVectorBytes));
}

}  // namespace dct::cuda
