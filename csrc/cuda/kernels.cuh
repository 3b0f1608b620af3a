#pragma once

// The ops on CUDA devices. docs/reference/ops.md defines them, and docs/design/kernels.md describes
// their design. Each op launches on `stream`, returns the first error and does not synchronize. No
// access is out of bounds, even if payloads and positions are invalid. `scratch` need not be
// cleared before or kept after a call.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/ops.h"

namespace dct::cuda {

// The scratch bytes of sample_threshold. Scratch memory must be 16-byte aligned.
int64_t sample_threshold_scratch_bytes(const SampleThresholdArgs& args);

// One kernel if there are few samples, else two.
cudaError_t sample_threshold(const SampleThresholdArgs& args, void* scratch, cudaStream_t stream);

// The tile sizes of mask_pack. The results do not depend on them.
struct MaskPackSizes {
  int warp_tile;      // elements per warp: 1,024 or 2,048
  int slot_capacity;  // entries that a warp can stage, a multiple of 8, at most 256
};
MaskPackSizes mask_pack_sizes(const MaskPackArgs& args);

// The scratch bytes of mask_pack. Scratch memory must be 16-byte aligned.
int64_t mask_pack_scratch_bytes(const MaskPackArgs& args, const MaskPackSizes& sizes);

// Two kernels. They read each element once, except the elements that the first kernel only counts
// (mask_pack.cu) and the entries that exceed the capacity. If only the second launch fails, entries
// are lost, but this does not happen in an intact CUDA context. The tensor must have fewer than
// 2^38 elements.
cudaError_t mask_pack(const MaskPackArgs& args, const MaskPackSizes& sizes, void* scratch,
                      cudaStream_t stream);

// One memset of the status if there are payloads, and one kernel, which writes each element once.
cudaError_t scatter_unpack(const ScatterUnpackArgs& args, cudaStream_t stream);

// Two launches.
cudaError_t quantize_pack(const QuantizePackArgs& args, cudaStream_t stream);

// One memset if there are payloads, and one launch.
cudaError_t dequantize_sum(const DequantizeSumArgs& args, cudaStream_t stream);

// One launch each, or none if there are no rows.
cudaError_t row_pack(const RowPackArgs& args, cudaStream_t stream);
cudaError_t row_gather(const RowGatherArgs& args, cudaStream_t stream);
cudaError_t row_unpack(const RowUnpackArgs& args, cudaStream_t stream);
cudaError_t row_quantize(const RowQuantizeArgs& args, cudaStream_t stream);
cudaError_t row_dequantize(const RowDequantizeArgs& args, cudaStream_t stream);
cudaError_t row_dequantize_sum(const RowDequantizeSumArgs& args, cudaStream_t stream);

// The scratch bytes of diff_pack. Scratch memory must be 16-byte aligned.
int64_t diff_pack_scratch_bytes(const DiffPackArgs& args);

// One kernel, or two if there are elements, and one memset if there are checksums. They read each
// element once, except the blocks whose words do not fit in a slot (diff_pack.cu).
cudaError_t diff_pack(const DiffPackArgs& args, void* scratch, cudaStream_t stream);

// One memset and one kernel.
cudaError_t patch_apply(const PatchApplyArgs& args, cudaStream_t stream);

// One memset, and one kernel if there are elements.
cudaError_t checksum(const ChecksumArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
