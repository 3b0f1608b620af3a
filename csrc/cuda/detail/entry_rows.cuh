#pragma once

// Rows of 1,024 entries, each in the registers of one warp, for the ops on dense payloads.

#include "../../common/quantized_payload.h"
#include "device.cuh"

namespace dct::cuda {

constexpr int kRowVectors = kRow / kWarpVector;  // each has two groups, with one scale each

// The entries of one lane. Vector v has four columns from column_of(v) on, so the lanes of a warp
// read and write 512 consecutive bytes. The lanes of a half-warp share one scale.
using RowEntries = float[kRowVectors][kVectorElements];

__device__ inline int column_of(int vector) {
  return vector * kWarpVector + lane_index() * kVectorElements;
}

// Whether entry e of a vector is among the first `length` entries of its row. Subtracting the
// lane's offset from the length leaves constants to compare with. Comparing columns instead would
// take 32 registers.
__device__ inline bool is_within(int vector, int e, int length) {
  return vector * kWarpVector + e < length - lane_index() * kVectorElements;
}

// Writes convert(x) to the first `length` elements of a row, by vectors if `whole`. By one warp.
template <typename Out, typename Convert>
__device__ void store_row(Out* row, int length, bool whole, const RowEntries& x, Convert convert) {
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
    Out converted[kVectorElements];
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) converted[e] = convert(x[v][e]);
    if (whole) {
      stream_out(row + column_of(v), converted);
      continue;
    }
#pragma unroll
    for (int e = 0; e < kVectorElements; ++e) {
      if (is_within(v, e, length)) row[column_of(v) + e] = converted[e];
    }
  }
}

__device__ inline void store_row(float* row, int length, bool whole, const RowEntries& x) {
  store_row(row, length, whole, x, [](float left) { return left; });
}

}  // namespace dct::cuda
