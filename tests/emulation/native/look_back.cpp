// look_back.cpp -- the look-back alone, a warp a tile: all tiles are resident, and one of them is
// held back while the others publish what they have, so that these look back over many windows.
#include "cuda/detail/look_back.cuh"

#include "cuda/detail/launch.cuh"
#include "support.h"

namespace {

using dct::cuda::TileCount;
using dct::cuda::Word;
using test::Random;

struct Tiles {
  Word* words;
  unsigned* ticket;
  const TileCount* own;
  TileCount* before;
  int held_back, rounds;
};

void kernel(Tiles tiles) {
  const int lane = dct::cuda::lane_index();
  const unsigned ticket = lane == 0 ? atomicAdd(tiles.ticket, 1u) : 0;
  const int index = static_cast<int>(__shfl_sync(dct::cuda::kFullWarp, ticket, 0));
  for (int i = 0; index == tiles.held_back && i < tiles.rounds; ++i) dct::cuda::back_off();
  const TileCount before = dct::cuda::look_back(tiles.words, index, tiles.own[index]);
  if (lane == 0) tiles.before[index] = before;
}

void one_case(Random& random) {
#if defined(__SANITIZE_THREAD__)
  const int64_t most = 40;  // a fiber costs ThreadSanitizer a megabyte
#else
  const int64_t most = 300;
#endif
  const int64_t count = random.pick<int64_t>({1, 2, 32, 33, 40, most, most, most});
  // Room behind the words, for a fault that is planted to use.
  std::vector<Word> words(count + 3 * 4096, dct::cuda::kNotYet);
  std::vector<TileCount> own(count), before(count), expected(count);
  TileCount total = {0, false};
  for (int64_t i = 0; i < count; ++i) {
    own[i] = {static_cast<Word>(random.pick<int64_t>({0, 1, 4096})), random.chance(0.01)};
    expected[i] = total;
    total = {total.count + own[i].count, total.non_finite || own[i].non_finite};
  }
  unsigned ticket = 0;
  emulator::options().resident_blocks = static_cast<int>(count);
  const Tiles tiles = {words.data(),
                       &ticket,
                       own.data(),
                       before.data(),
                       static_cast<int>(random.pick<int64_t>({0, 0, random.below(count)})),
                       random.pick({0, 20})};
  const cudaError_t launched = dct::cuda::launch(kernel, dim3(static_cast<unsigned>(count)),
                                                 dct::cuda::kWarpSize, 0, nullptr, tiles);
  test::expect(launched == cudaSuccess, "launch");
  for (int64_t i = 0; i < count; ++i) {
    test::expect(before[i].count == expected[i].count, "count before tile", i);
    test::expect(before[i].non_finite == expected[i].non_finite, "non-finite before tile", i);
  }
}

}  // namespace

int main(int argc, char** argv) { return test::run(argc, argv, 4, one_case); }
