#pragma once

// The checks that make an op safe to call directly, and its arguments as kernels take them: one
// function per op, for every dispatch key. Results that an op allocates are left to the caller.
// Errors name the argument and its value; dct_kernels/_contract.py has the full sentences.

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "../common/ops.h"

namespace dct {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

SampleThresholdArgs sample_threshold_args(const Tensor& grad, const Tensor& residual,
                                          double density, int64_t ranges, int64_t max_samples,
                                          int64_t seed, const OptionalTensor& inv_scale);

MaskPackArgs mask_pack_args(const Tensor& residual, const Tensor& grad, const Tensor& threshold,
                            const Tensor& payload, const Tensor& seen, int64_t capacity,
                            ScalarType value_dtype, const OptionalTensor& inv_scale);

ScatterUnpackArgs scatter_unpack_args(const Tensor& payloads, const Tensor& out, int64_t capacity,
                                      ScalarType value_dtype, double scale,
                                      const OptionalTensor& out_scale);

QuantizePackArgs quantize_pack_args(const OptionalTensor& residual, const Tensor& grad,
                                    const Tensor& payload, const std::string& format,
                                    const OptionalTensor& inv_scale);

DequantizeSumArgs dequantize_sum_args(const Tensor& payloads, const Tensor& out,
                                      const std::string& format, double scale,
                                      const OptionalTensor& out_scale);

DequantizeSumPackArgs dequantize_sum_pack_args(const Tensor& payloads, const Tensor& residual,
                                               const Tensor& payload, const std::string& format,
                                               double scale);

RowPackArgs row_pack_args(const Tensor& x, int64_t k, ScalarType value_dtype);

RowGatherArgs row_gather_args(const Tensor& x, const Tensor& positions, int64_t k,
                              ScalarType value_dtype);

RowUnpackArgs row_unpack_args(const Tensor& values, const Tensor& positions, int64_t width,
                              ScalarType dtype);

RowQuantizeArgs row_quantize_args(const Tensor& x, const std::string& format);

RowDequantizeArgs row_dequantize_args(const Tensor& rows, int64_t width, const std::string& format,
                                      ScalarType dtype);

}  // namespace dct
