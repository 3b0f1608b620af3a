// mask_pack.cu -- error feedback, threshold and ordered compaction in two kernels, of which no
// block waits for another.
//
// The first streams: every warp adds gradients to residuals, marks what passes, takes from it what
// will be packed, and puts that aside in a slot of its own, counted. The second knows all counts:
// it moves the slots' entries, 1 % of the elements, to their place in the payload. What did not fit
// a slot, or is irregular, the first has only counted, and the second does it.
#include "detail/launch.cuh"
#include "detail/mask_pack_place.cuh"
#include "detail/mask_pack_stage.cuh"
#include "mask_pack.cuh"

namespace dct::cuda {
namespace {

constexpr int64_t kMostParts = 256;  // blocks that place a range: about as many as are resident

RangeTiles tiles_of(const MaskPackArgs& args, const MaskPackSizes& sizes) {
  return {args.numel, args.ranges, int64_t{sizes.warp_tile} * kWarps};
}

// The scratch at `memory`, and its bytes.
int64_t lay_out(const MaskPackArgs& args, const MaskPackSizes& sizes, uint8_t* memory,
                Staging& staging) {
  staging.warp_tile_bits = sizes.warp_tile == 512 ? 9 : sizes.warp_tile == 1024 ? 10 : 11;
  staging.room = sizes.room;
  const int64_t tiles = tiles_of(args, sizes).total;
  int64_t bytes = 0;
  const auto take = [&](int64_t size) {
    uint8_t* const part = memory + bytes;
    bytes += align16(size);
    return part;
  };
  staging.segments = reinterpret_cast<Word*>(take(sizeof(Word) * args.num_segments));
  staging.totals = reinterpret_cast<uint32_t*>(take(sizeof(uint32_t) * tiles));
  staging.unsent = reinterpret_cast<uint32_t*>(take(sizeof(uint32_t) * tiles));
  staging.counts = reinterpret_cast<WarpCount*>(take(sizeof(WarpCount) * tiles * kWarps));
  staging.slots = take(tiles * kWarps * sizes.room * (2 + itemsize(args.value_dtype)));
  return bytes;
}

template <typename Grad, typename Format>
cudaError_t run(const MaskPackArgs& args, const RangeTiles& tiles, const Staging& staging,
                cudaStream_t stream) {
  const bool aligned = is_aligned(args.residual, kVectorElements * sizeof(float)) &&
                       is_aligned(args.grad, kVectorElements * sizeof(Grad));
  const cudaError_t staged =
      launch(mask_pack_stage_kernel<Grad, Format>, dim3(static_cast<unsigned>(tiles.total)),
             kThreads, 0, stream, args, tiles, staging, aligned);
  if (staged != cudaSuccess) return staged;
  const int64_t of_range =
      max(int64_t{tiles.tiles_per_full}, max(int64_t{tiles.short_tiles}, int64_t{1}));
  // A multiple of the warps, which place as many tiles at a time, among them whole payload blocks.
  const int64_t per_part = max(ceil_div(of_range, kMostParts * kWarps), int64_t{1}) * kWarps;
  const int64_t parts = ceil_div(of_range, per_part);
  const Sections layout(args.numel, args.capacity, args.value_dtype, args.ranges);
  return launch(mask_pack_place_kernel<Grad, Format>,
                dim3(static_cast<unsigned>(parts * args.ranges)), kThreads, 0, stream, args, tiles,
                layout, staging, static_cast<unsigned>(parts), static_cast<unsigned>(per_part));
}

}  // namespace

MaskPackSizes mask_pack_sizes(const MaskPackArgs& args) {
  // Few elements are cut into small tiles, so that every multiprocessor has some.
  const int64_t wanted = args.numel < int64_t{1} << 22   ? 512
                         : args.numel < int64_t{1} << 23 ? 1024
                                                         : 2048;
  const int least = kRow * (args.grad == nullptr ? kVectors<NoGrad> : kVectors<float>);
  MaskPackSizes sizes;
  sizes.warp_tile = max(static_cast<int>(wanted), least);
  // Half as many again as the capacity gives a warp, and some; at 256 it leaves the rest.
  const int64_t share =
      args.numel > 0 ? ceil_div(sizes.warp_tile * args.capacity * args.ranges, args.numel) : 0;
  sizes.room = static_cast<int>(min(ceil_div(share + share / 2 + 24, 8) * 8, int64_t{256}));
  return sizes;
}

int64_t mask_pack_scratch_bytes(const MaskPackArgs& args, const MaskPackSizes& sizes) {
  Staging staging;
  return lay_out(args, sizes, nullptr, staging);
}

cudaError_t mask_pack(const MaskPackArgs& args, const MaskPackSizes& sizes, void* scratch,
                      cudaStream_t stream) {
  const RangeTiles tiles = tiles_of(args, sizes);
  if (tiles.total > kMaxGrid / kWarps || args.num_segments > 1 << 30) return cudaErrorInvalidValue;
  Staging staging;
  lay_out(args, sizes, static_cast<uint8_t*>(scratch), staging);
  const auto run_on = [&](auto grad) {
    using Grad = decltype(grad);
    return args.value_dtype == DType::kE3M0 ? run<Grad, E3M0Format>(args, tiles, staging, stream)
                                            : run<Grad, FloatFormat>(args, tiles, staging, stream);
  };
  return args.grad == nullptr ? run_on(NoGrad{}) : dispatch(args.grad_dtype, run_on);
}

}  // namespace dct::cuda
