// mask_pack.cu -- error feedback, thresholding and stable stream compaction in two kernels. The
// first is a streaming pass: each warp accumulates gradients into residuals and compacts what
// passes into a slot of its own. The second knows all counts: it scatters these entries to the
// payload, and compacts elements that the first only counted, where a slot was full or a vector is
// cut. No block waits for another.
#include "detail/launch.cuh"
#include "detail/mask_pack_place.cuh"
#include "detail/mask_pack_stage.cuh"
#include "mask_pack.cuh"

namespace dct::cuda {
namespace {

constexpr int64_t kMostParts =
    256;  // blocks per range in the second kernel: about as many as are resident

RangeTiles tiles_of(const MaskPackArgs& args, const MaskPackSizes& sizes) {
  return {args.numel, args.ranges, int64_t{sizes.warp_tile} * kWarps};
}

// Lays out the scratch at `memory` and returns its bytes.
int64_t layout_scratch(const MaskPackArgs& args, const MaskPackSizes& sizes, uint8_t* memory,
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
  const int64_t tiles_in_range = max(max(tiles.tiles_per_full, tiles.short_tiles), 1u);
  const int64_t per_part = max(ceil_div(tiles_in_range, kMostParts), int64_t{kWarps});
  const int64_t parts = ceil_div(tiles_in_range, per_part);
  const PayloadLayout layout =
      payload_layout(args.numel, args.capacity, args.value_dtype, args.ranges);
  return launch(mask_pack_place_kernel<Grad>, dim3(static_cast<unsigned>(parts * args.ranges)),
                kThreads, 0, stream, args, tiles, layout, staging, static_cast<unsigned>(parts),
                static_cast<unsigned>(per_part));
}

}  // namespace

MaskPackSizes mask_pack_sizes(const MaskPackArgs& args) {
  // Smaller tensors get small tiles, so that every multiprocessor has work.
  const int warp_tile = kWarpVector * kVectors * (args.numel < 1 << 25 ? 1 : 2);
  // One and a half times a warp's share of the capacity, and a few more; past 256 the second kernel
  // takes over.
  const int64_t share =
      args.numel > 0 ? ceil_div(warp_tile * args.capacity * args.ranges, args.numel) : 0;
  return {warp_tile, static_cast<int>(min(ceil_div(share + share / 2 + 24, 8) * 8, int64_t{256}))};
}

int64_t mask_pack_scratch_bytes(const MaskPackArgs& args, const MaskPackSizes& sizes) {
  Staging staging;
  return layout_scratch(args, sizes, nullptr, staging);
}

cudaError_t mask_pack(const MaskPackArgs& args, const MaskPackSizes& sizes, void* scratch,
                      cudaStream_t stream) {
  const RangeTiles tiles = tiles_of(args, sizes);
  if (tiles.total > kMaxGrid / kWarps || args.num_segments > 1 << 30) return cudaErrorInvalidValue;
  Staging staging;
  layout_scratch(args, sizes, static_cast<uint8_t*>(scratch), staging);
  const auto with = [&](auto grad) { return run<decltype(grad)>(args, tiles, staging, stream); };
  return args.grad == nullptr ? with(NoGrad{}) : dispatch(args.grad_dtype, with);
}

}  // namespace dct::cuda
