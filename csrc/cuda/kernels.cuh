#pragma once

// The ops on CUDA devices. docs/reference/ops.md defines them, docs/design/kernels.md says how they
// work. All launch on `stream` and return the first error; none synchronizes. No access is out of
// bounds, whatever payloads and positions hold. `scratch` need not be cleared or kept.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/ops.h"

namespace dct::cuda {

// Scratch of sample_threshold, aligned to 4 bytes.
int64_t sample_threshold_scratch_bytes(const SampleThresholdArgs& args);

// One or two kernels if max_samples is small, else one memset and three kernels for all ranges.
cudaError_t sample_threshold(const SampleThresholdArgs& args, void* scratch, cudaStream_t stream);

// Tile sizes of mask_pack. The results do not depend on them.
struct MaskPackSizes {
  int warp_tile;      // elements per warp: 1,024 or 2,048
  int slot_capacity;  // entries that a warp can stage, a multiple of 8 up to 2,048
};
MaskPackSizes mask_pack_sizes(const MaskPackArgs& args);

// Scratch of mask_pack, aligned to 16 bytes.
int64_t mask_pack_scratch_bytes(const MaskPackArgs& args, const MaskPackSizes& sizes);

// Two kernels, and one pass over the tensor unless more entries pass than slots hold. Entries are
// lost if only the second launch fails, which does not happen in a sound context. Tensors of fewer
// than 2^38 elements.
cudaError_t mask_pack(const MaskPackArgs& args, const MaskPackSizes& sizes, void* scratch,
                      cudaStream_t stream);

// One memset (of the status) and one kernel, which reads each entry and writes each element once.
cudaError_t scatter_unpack(const ScatterUnpackArgs& args, cudaStream_t stream);

// Two launches.
cudaError_t quantize_pack(const QuantizePackArgs& args, cudaStream_t stream);

// The first of them: writes the headers of all ranges, and zeros to `cleared` [num_cleared].
cudaError_t write_quantized_headers(uint8_t* payload, int64_t numel, int64_t ranges, int64_t nbytes,
                                    PayloadFormat format, int32_t* cleared, int64_t num_cleared,
                                    cudaStream_t stream);

// A memset, if there are payloads, and one launch.
cudaError_t dequantize_sum(const DequantizeSumArgs& args, cudaStream_t stream);

// Two launches.
cudaError_t dequantize_sum_pack(const DequantizeSumPackArgs& args, cudaStream_t stream);

// One launch each; none without rows.
cudaError_t row_pack(const RowPackArgs& args, cudaStream_t stream);
cudaError_t row_gather(const RowGatherArgs& args, cudaStream_t stream);
cudaError_t row_unpack(const RowUnpackArgs& args, cudaStream_t stream);
cudaError_t row_quantize(const RowQuantizeArgs& args, cudaStream_t stream);
cudaError_t row_dequantize(const RowDequantizeArgs& args, cudaStream_t stream);
cudaError_t row_dequantize_sum(const RowDequantizeSumArgs& args, cudaStream_t stream);

}  // namespace dct::cuda
