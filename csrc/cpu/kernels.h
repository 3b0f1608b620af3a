#pragma once

// The ops on the CPU. docs/reference/ops.md defines them.

#include "../common/ops.h"
#include "parallel.h"

namespace dct::cpu {

void sample_threshold(const SampleThresholdArgs& args, const Parallel& parallel);
void mask_pack(const MaskPackArgs& args, const Parallel& parallel);
void scatter_unpack(const ScatterUnpackArgs& args, const Parallel& parallel);

void quantize_pack(const QuantizePackArgs& args, const Parallel& parallel);
void dequantize_sum(const DequantizeSumArgs& args, const Parallel& parallel);

void row_pack(const RowPackArgs& args, const Parallel& parallel);
void row_gather(const RowGatherArgs& args, const Parallel& parallel);
void row_unpack(const RowUnpackArgs& args, const Parallel& parallel);
void row_quantize(const RowQuantizeArgs& args, const Parallel& parallel);
void row_dequantize(const RowDequantizeArgs& args, const Parallel& parallel);
void row_dequantize_sum(const RowDequantizeSumArgs& args, const Parallel& parallel);

void diff_pack(const DiffPackArgs& args, const Parallel& parallel);
void patch_apply(const PatchApplyArgs& args, const Parallel& parallel);
void checksum(const ChecksumArgs& args, const Parallel& parallel);

}  // namespace dct::cpu
