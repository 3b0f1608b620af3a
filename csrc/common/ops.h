#pragma once

// The checked arguments of the ops, as raw pointers and sizes. The CPU function and the CUDA
// function of an op take the same struct, with pointers to memory of their own device.

#include <cstdint>

#include "floats.h"

namespace dct {

// Loads the value of a one-element scale tensor. A null pointer stands for 1.
DCT_HOST_DEVICE inline float load_scale(const float* scale) {
  return scale != nullptr ? *scale : 1.0f;
}

enum class PayloadFormat : uint8_t;  // quantized_payload.h
enum class RowFormat : uint8_t;      // row_layout.h

struct SampleThresholdArgs {
  const void* grad;  // [numel] of grad_dtype
  DType grad_dtype;
  const float* residual;  // [numel]
  int64_t numel;
  int64_t ranges;
  double density;  // in (0, 1]
  int64_t max_samples;
  uint32_t seed;
  const float* inv_scale;  // one element; null means 1
  float* threshold;        // out: [ranges]
};

struct MaskPackArgs {
  float* residual;   // in and out: [numel]
  const void* grad;  // [numel] of grad_dtype
  DType grad_dtype;
  int64_t numel;
  int64_t ranges;
  const float* threshold;  // [ranges]
  int32_t* seen;           // out: [ranges]
  uint8_t* payload;        // out: [ranges, payload_layout(...).nbytes], 16-byte aligned
  int64_t capacity;
  DType value_dtype;
  const float* inv_scale;  // one element; null means 1
};

struct ScatterUnpackArgs {
  const uint8_t* payloads;  // [ranks, ranges, payload_layout(...).nbytes], 16-byte aligned
  int64_t ranks;
  int64_t ranges;
  int64_t capacity;
  DType value_dtype;
  void* out;  // out: [numel] of out_dtype
  DType out_dtype;
  int64_t numel;
  float scale;
  const float* out_scale;  // one element; null means 1
  int32_t* status;         // out: [ranks]
};

struct QuantizePackArgs {
  float* residual;   // in and out: [numel], or null
  const void* grad;  // [numel] of grad_dtype
  DType grad_dtype;
  int64_t numel;
  uint8_t* payload;  // out: [ranges, nbytes], 16-byte aligned
  int64_t ranges;
  int64_t range_length;  // elements of a full range: whole blocks, or a row of a matrix of ranges
  int64_t nbytes;        // a multiple of 16, enough for the longest range
  PayloadFormat format;
  const float* inv_scale;  // one element; null means 1
};

struct DequantizeSumArgs {
  const uint8_t* payloads;  // [ranks, ranges, nbytes], 16-byte aligned
  int64_t ranks;
  int64_t ranges;
  int64_t range_length;  // as in QuantizePackArgs
  int64_t nbytes;
  PayloadFormat format;
  void* out;  // out: [numel] of out_dtype
  DType out_dtype;
  int64_t numel;
  float scale;
  const float* out_scale;  // one element; null means 1
  int32_t* status;         // out: [ranks, statuses]
  int64_t statuses;        // per rank: 1, or one per range

  DCT_HOST_DEVICE int32_t& status_of(int64_t rank, int64_t range) const {
    return status[statuses == 1 ? rank : rank * statuses + range];
  }
};

struct RowPackArgs {
  const void* x;  // [rows, width] of x_dtype
  DType x_dtype;
  int64_t rows;
  int64_t width;
  int64_t k;
  void* values;  // out: [rows, k] of value_dtype
  DType value_dtype;
  uint8_t* positions;  // out: [rows, position_bytes(width, k)]
};

struct RowGatherArgs {
  const void* x;  // [rows, width] of x_dtype
  DType x_dtype;
  const uint8_t* positions;  // [rows, position_bytes(width, k)]
  int64_t rows;
  int64_t width;
  int64_t k;
  void* values;  // out: [rows, k] of value_dtype
  DType value_dtype;
};

struct RowUnpackArgs {
  const void* values;  // [rows, k] of value_dtype
  DType value_dtype;
  const uint8_t* positions;  // [rows, position_bytes(width, k)]
  int64_t rows;
  int64_t width;
  int64_t k;
  void* out;  // out: [rows, width] of out_dtype
  DType out_dtype;
};

struct RowQuantizeArgs {
  const void* x;  // [rows, width] of x_dtype
  DType x_dtype;
  int64_t rows;
  int64_t width;
  RowFormat format;
  uint8_t* out;  // out: [rows, row_bytes(width, format)]
};

struct RowDequantizeArgs {
  const uint8_t* quantized;  // [rows, row_bytes(width, format)]
  int64_t rows;
  int64_t width;
  RowFormat format;
  void* out;  // out: [rows, width] of out_dtype
  DType out_dtype;
};

struct RowDequantizeSumArgs {
  const uint8_t* quantized;  // [ranks, rows, row_bytes(width, format)]
  int64_t ranks;             // 1 or more
  int64_t rows;
  int64_t width;
  RowFormat format;
  void* out;  // out: [rows, width] of out_dtype
  DType out_dtype;
};

struct DiffPackArgs {
  const void* weights;       // [numel] of weights_dtype
  DType weights_dtype;       // float32 or the dtype of the snapshot
  const uint16_t* snapshot;  // [numel]
  DType dtype;               // of the snapshot
  int64_t numel;
  uint8_t* patch;      // out: [patch_bytes(numel, capacity)], 16-byte aligned
  int64_t* checksums;  // out: [2], or null
  int64_t capacity;
};

struct PatchApplyArgs {
  const uint8_t* patch;  // [nbytes], 16-byte aligned
  int64_t nbytes;
  int64_t numel;
  DType dtype;
  int32_t* status;    // out: [1]
  uint16_t* weights;  // in and out: [numel] of dtype; null for patch_check
};

struct ChecksumArgs {
  const uint16_t* weights;  // [numel]
  int64_t numel;
  int64_t* checksum;  // out: [1]
};

}  // namespace dct
