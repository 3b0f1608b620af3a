// mask_pack.cu -- error feedback, threshold and ordered compaction in two kernels. The first
// streams: a warp adds gradients to residuals and puts what passes in a slot of its own. The second
// knows all counts: it moves these entries to their place in the payload, and packs what the first
// has only counted, where there was no room or a vector is cut. No block waits for another.
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
  staging.warp_tile = sizes.warp_tile;
  staging.room = sizes.room;
  const int64_t tiles = tiles_of(args, sizes).total;
  const int64_t slots = tiles * kWarps * sizes.room * (2 + itemsize(args.value_dtype));
  staging.slots = memory;
  staging.totals = reinterpret_cast<uint32_t*>(memory + slots);
  staging.counts = reinterpret_cast<WarpCount*>(staging.totals + tiles);
  return slots + tiles * int64_t{sizeof(uint32_t) + kWarps * sizeof(WarpCount)};
}

template <typename Grad>
cudaError_t run(const MaskPackArgs& args, const RangeTiles& tiles, const Staging& staging,
                cudaStream_t stream) {
  const bool aligned = is_aligned(args.residual, kVectorElements * sizeof(float)) &&
                       is_aligned(args.grad, kVectorElements * sizeof(Grad));
  const cudaError_t staged =
      launch(mask_pack_stage_kernel<Grad>, dim3(static_cast<unsigned>(tiles.total)), kThreads, 0,
             stream, args, tiles, staging, aligned);
  if (staged != cudaSuccess) return staged;
  const int64_t of_range = max(max(tiles.tiles_per_full, tiles.short_tiles), 1u);
  const int64_t per_part = max(ceil_div(of_range, kMostParts), int64_t{kWarps});
  const int64_t parts = ceil_div(of_range, per_part);
  const PayloadLayout layout =
      payload_layout(args.numel, args.capacity, args.value_dtype, args.ranges);
  return launch(mask_pack_place_kernel<Grad>, dim3(static_cast<unsigned>(parts * args.ranges)),
                kThreads, 0, stream, args, tiles, layout, staging, static_cast<unsigned>(parts),
                static_cast<unsigned>(per_part));
}

}  // namespace

MaskPackSizes mask_pack_sizes(const MaskPackArgs& args) {
  // Few elements are cut into small tiles, so that every multiprocessor has some.
  const int wanted = args.numel < 1 << 22 ? 512 : args.numel < 1 << 23 ? 1024 : 2048;
  const int least = kRow * (args.grad == nullptr ? kVectors<NoGrad> : kVectors<float>);
  const int warp_tile = max(wanted, least);
  // Half as many again as the capacity gives a warp, and some; at 256 it leaves the rest.
  const int64_t share =
      args.numel > 0 ? ceil_div(warp_tile * args.capacity * args.ranges, args.numel) : 0;
  return {warp_tile, static_cast<int>(min(ceil_div(share + share / 2 + 24, 8) * 8, int64_t{256}))};
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
  const auto with = [&](auto grad) { return run<decltype(grad)>(args, tiles, staging, stream); };
  return args.grad == nullptr ? with(NoGrad{}) : dispatch(args.grad_dtype, with);
}

}  // namespace dct::cuda
