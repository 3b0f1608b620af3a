// diff_pack and checksum. diff_pack packs one block of 4,096 entries at a time. A vector loop
// compares the bits, and scalar code packs the few changed entries, without a branch that depends
// on the number of changes or on a step. The blocks are split into chunks, one per thread. The
// first chunk is packed directly into the patch. The words of the other chunks are packed into
// scratch memory, and move to their place once the preceding words are counted.

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "../common/patch.h"
#include "bitmask.h"
#include "kernels.h"
#include "simd_dispatch.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace dct::cpu {
namespace {

constexpr int64_t kCompared = 64;  // entries, and bits of a word

// The sum of the hashes of the groups in [begin, n) of a block. The last group may be incomplete.
uint64_t hash_groups(const uint16_t* x, int64_t begin, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = begin; i < n; i += kHashed) {
    uint64_t bits = 0;
    std::memcpy(&bits, x + i, 2 * (n - i < kHashed ? n - i : kHashed));
    sum += group_hash(bits, static_cast<uint32_t>(i / kHashed));
  }
  return sum;
}

// Comparison and hashing without and with AVX2, with n a multiple of kCompared. Compilers do not
// turn comparisons into bits, and they multiply numbers of 32 bits as numbers of 64 bits.
//
// `differ` sets bit i of `bits` to x[i] != y[i], for i < n. It also prefetches the entries that
// follow n entries later, because the memory would be idle while the changed entries are packed.
//
// `hash` returns the sum of the hashes of the first n entries of a block.
struct PlainPatch {
  static void differ(const uint16_t* x, const uint16_t* y, int64_t n, uint64_t* bits) {
    for (int64_t w = 0; w < n / kCompared; ++w) {
      uint64_t word = 0;
      for (int64_t i = 0; i < kCompared; ++i) {
        word |= uint64_t{x[w * kCompared + i] != y[w * kCompared + i]} << i;
      }
      bits[w] = word;
    }
  }
  static uint64_t hash(const uint16_t* x, int64_t n) { return hash_groups(x, 0, n); }
};

struct Avx2Patch;

#if defined(__x86_64__) && defined(__GNUC__)

void prefetch_strip(const uint16_t* x) {
  __builtin_prefetch(x);
  __builtin_prefetch(x + kCompared / 2);
}

struct Avx2Patch {
#define DCT_AVX2 __attribute__((target("avx2")))
  DCT_AVX2 static void differ(const uint16_t* x, const uint16_t* y, int64_t n, uint64_t* bits) {
    for (int64_t i = 0; i < n; i += kCompared) {
      prefetch_strip(x + i + n);
      prefetch_strip(y + i + n);
      const uint64_t low = equal(x + i, y + i), high = equal(x + i + 32, y + i + 32);
      bits[i / kCompared] = ~(low | high << 32);
    }
  }
  DCT_AVX2 static uint64_t hash(const uint16_t* x, int64_t n) {
    const __m256i first = _mm256_setr_epi32(1, 2, 3, 4, 5, 6, 7, 8);
    __m256i key = _mm256_mullo_epi32(first, _mm256_set1_epi32(static_cast<int>(kWordKey)));
    const __m256i step = _mm256_set1_epi32(static_cast<int>(8 * kWordKey));
    __m256i sum = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 16) {
      const __m256i words = _mm256_add_epi32(load(x + i), key);
      sum = _mm256_add_epi64(sum, _mm256_mul_epu32(words, _mm256_srli_epi64(words, 32)));
      key = _mm256_add_epi32(key, step);
    }
    uint64_t sums[4];
    std::memcpy(sums, &sum, sizeof(sums));
    return sums[0] + sums[1] + sums[2] + sums[3];
  }

 private:
  DCT_AVX2 static __m256i load(const uint16_t* x) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  }
  // Compares 32 entries.
  DCT_AVX2 static uint32_t equal(const uint16_t* x, const uint16_t* y) {
    const __m256i low = _mm256_cmpeq_epi16(load(x), load(y));
    const __m256i high = _mm256_cmpeq_epi16(load(x + 16), load(y + 16));
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
    return static_cast<uint32_t>(_mm256_movemask_epi8(bytes));
  }
#undef DCT_AVX2
};

#endif

// Calls loop(lanes). Vectors of 64 bytes are not faster, because these loops wait for memory.
template <typename Loop>
void vectorize_patch(const Loop& loop) {
  vectorize_by<PlainPatch, Avx2Patch, Avx2Patch>(loop);
}

// The sum of the hashes of a block of n entries. Call it inside vectorize_patch().
template <typename Lanes>
uint64_t hash_block(const uint16_t* x, int64_t n) {
  const int64_t whole = n / kCompared * kCompared;
  return Lanes::hash(x, whole) + hash_groups(x, whole, n);
}

struct Chunk {
  int64_t begin, end;                   // blocks
  std::unique_ptr<uint16_t[]> scratch;  // null for the first chunk
  uint16_t* words;                      // in the patch or in scratch memory
  int64_t capacity;                     // words
  int64_t count = 0;                    // words that the changes need

  int64_t stored() const { return std::min(count, capacity); }
};

// Memory of a task, which stays in the L1 cache.
struct Scratch {
  alignas(64) uint16_t now[kPatchBlock];
  alignas(64) uint16_t before[kPatchBlock];
  uint64_t differs[kPatchBlock / kCompared];
  uint16_t positions[kPatchBlock + kSpareIndices];
  uint16_t words[kMostBlockWords + 1];  // a full value is written even if it is not needed
};

// Writes the words of a block, of which n entries are compared, a multiple of kCompared.
template <typename Lanes>
BlockNumbers pack_block(const uint16_t* now, const uint16_t* before, int64_t n, Scratch& scratch) {
  Lanes::differ(now, before, n, scratch.differs);
  const int64_t entries = bit_indices(scratch.differs, n / kCompared, scratch.positions);
  uint16_t* value = scratch.words + entries;
  for (int64_t i = 0; i < entries; ++i) {
    const uint32_t position = scratch.positions[i];
    const uint32_t code = step_code(now[position], before[position]);
    scratch.words[i] = static_cast<uint16_t>(position << 4 | code);
    *value = now[position];
    value += code == kFullValue;
  }
  return {static_cast<uint16_t>(entries), static_cast<uint16_t>(value - scratch.words)};
}

template <typename Half>
const uint16_t* round_block(const float* x, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = round_to<Half>(x[i]).bits;
  return out;
}

// The bits of the new weights, in place or rounded to `out`.
const uint16_t* bits_of(const DiffPackArgs& args, int64_t begin, int64_t n, uint16_t* out) {
  if (args.weights_dtype != DType::kFloat32) {
    return static_cast<const uint16_t*>(args.weights) + begin;
  }
  const float* x = static_cast<const float*>(args.weights) + begin;
  return args.dtype == DType::kBFloat16 ? round_block<BFloat16>(x, n, out)
                                        : round_block<Float16>(x, n, out);
}

const uint16_t* pad(const uint16_t* x, int64_t n, int64_t padded, uint16_t* out) {
  if (x != out) std::copy_n(x, n, out);
  std::fill(out + n, out + padded, uint16_t{0});
  return out;
}

// Adds the sum of a thread to a checksum.
void add(int64_t& checksum, uint64_t sum) {
  __atomic_fetch_add(&checksum, static_cast<int64_t>(sum), __ATOMIC_RELAXED);
}

template <typename Lanes>
void pack(const DiffPackArgs& args, Chunk& chunk) {
  auto* numbers = reinterpret_cast<BlockNumbers*>(args.patch + sizeof(PayloadHeader));
  Scratch scratch;
  uint64_t old_sum = 0, new_sum = 0;
  for (int64_t b = chunk.begin; b < chunk.end; ++b) {
    const int64_t begin = b * kPatchBlock, n = std::min(args.numel - begin, kPatchBlock);
    const uint16_t* now = bits_of(args, begin, n, scratch.now);
    const uint16_t* before = args.snapshot + begin;
    if (args.checksums != nullptr) {
      new_sum += block_factor(b) * hash_block<Lanes>(now, n);
      old_sum += block_factor(b) * hash_block<Lanes>(before, n);
    }
    const int64_t padded = ceil_div(n, kCompared) * kCompared;
    if (padded != n) {
      now = pad(now, n, padded, scratch.now);
      before = pad(before, n, padded, scratch.before);
    }
    numbers[b] = pack_block<Lanes>(now, before, padded, scratch);
    const int64_t words = numbers[b].words, fits = std::min(words, chunk.capacity - chunk.stored());
    std::memcpy(chunk.words + chunk.stored(), scratch.words, fits * sizeof(uint16_t));
    chunk.count += words;
  }
  if (args.checksums == nullptr) return;
  add(args.checksums[0], old_sum);
  add(args.checksums[1], new_sum);
}

}  // namespace

void diff_pack(const DiffPackArgs& args, const Parallel& parallel) {
  auto* words = reinterpret_cast<uint16_t*>(args.patch + patch_words_offset(args.numel));
  const int64_t blocks = patch_blocks(args.numel), tasks = std::min(parallel.threads, blocks);
  if (args.checksums != nullptr) args.checksums[0] = args.checksums[1] = 0;
  std::vector<Chunk> chunks;
  for (int64_t task = 0; task < tasks; ++task) {
    const Share span = share(blocks, tasks, task);
    Chunk& chunk = chunks.emplace_back(Chunk{span.begin, span.end, nullptr, words, args.capacity});
    if (task == 0) continue;
    chunk.capacity = std::min(chunk.capacity, (span.end - span.begin) * kMostBlockWords);
    // Uninitialized, so pages that hold no word are never touched.
    chunk.scratch.reset(new uint16_t[chunk.capacity]);
    chunk.words = chunk.scratch.get();
  }
  parallel.run(tasks, [&](int64_t task) {
    vectorize_patch([&](auto lanes) { pack<decltype(lanes)>(args, chunks[task]); });
  });
  int64_t count = 0;
  for (const Chunk& chunk : chunks) {
    const int64_t fits = std::clamp<int64_t>(args.capacity - count, 0, chunk.stored());
    if (fits > 0 && chunk.scratch != nullptr) std::copy_n(chunk.words, fits, words + count);
    count += chunk.count;
  }
  const PayloadHeader header = patch_header(args.numel, args.capacity, args.dtype, count);
  std::memcpy(args.patch, &header, sizeof(header));
}

void checksum(const ChecksumArgs& args, const Parallel& parallel) {
  *args.checksum = 0;
  const int64_t blocks = patch_blocks(args.numel), tasks = std::min(parallel.threads, blocks);
  parallel.run(tasks, [&](int64_t task) {
    const Share span = share(blocks, tasks, task);
    vectorize_patch([&](auto lanes) {
      uint64_t sum = 0;
      for (int64_t b = span.begin; b < span.end; ++b) {
        const int64_t begin = b * kPatchBlock, n = std::min(args.numel - begin, kPatchBlock);
        sum += block_factor(b) * hash_block<decltype(lanes)>(args.weights + begin, n);
      }
      add(*args.checksum, sum);
    });
  });
}

}  // namespace dct::cpu
