#pragma once

// Quantized rows in shared memory, for row_dequantize and row_dequantize_sum. 2 to 32 lanes decode
// a row. Rows have no alignment, but the rows of a warp are contiguous. So the warp copies their
// bytes to shared memory in vectors of 16 bytes. In shared memory, a lane can read codes at any
// byte address.

#include "row_codes.cuh"

namespace dct::cuda {

constexpr int kLaneColumns = 32;  // per lane at a time
constexpr int kWarpColumns = kWarpSize * kLaneColumns;
constexpr int kMostWarpRows = kWarpSize / 2;  // each has a scale

// Number of vectors that hold a warp's rows, including the other bytes in the first and the last
// vector. Reading codes may read `kOverread` bytes past their first byte.
template <RowFormat kFormat, int kOverread>
constexpr int kStagedVectors =
    (kWarpColumns / codes_per_byte(kFormat) + kMostWarpRows * kScaleBytes + kOverread) /
        kVectorBytes +
    2;

// The division of rows among lanes.
struct RowLanes {
  int log_lanes;  // a row has 2^log_lanes lanes
  int64_t parts;  // and this many parts, of at most 2^log_lanes * kLaneColumns columns

  explicit RowLanes(int64_t width) : log_lanes(1) {
    while (log_lanes < 5 && (kLaneColumns << log_lanes) < width) ++log_lanes;
    parts = (width - 1) / (kLaneColumns << log_lanes) + 1;
  }
};

// `count` bytes of a tensor, starting at byte `from`.
struct Span {
  const uint8_t* tensor;
  int64_t tensor_bytes, from;
  int count;
};

// The vectors that contain a span, in registers between the load and the store to shared memory.
template <int kVectors, int kOverread>
struct StagedBytes {
  static constexpr int kLoads = (kVectors + kWarpSize - 1) / kWarpSize;
  static_assert(kOverread < kVectorBytes);
  uint4 read[kLoads];
  int skip;        // bytes before the span in its first vector
  int begin, end;  // the vectors that are inside the tensor

  // By one warp. `at_edge`: whether vectors may lie partly outside the tensor. Such vectors are not
  // loaded.
  __device__ void load(const Span& span, bool at_edge) {
    const uint8_t* source = span.tensor + span.from;
    skip = static_cast<int>(reinterpret_cast<uintptr_t>(source) % kVectorBytes);
    begin = 0;
    end = vectors(span);
    if (at_edge) {
      begin = span.from < skip ? 1 : 0;
      const int64_t whole = (span.tensor_bytes - span.from + skip) / kVectorBytes;
      end = static_cast<int>(min(whole, int64_t{end}));
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int v = j * kWarpSize + lane_index();
      if (v >= begin && v < end) {
        read[j] = __ldcs(reinterpret_cast<const uint4*>(source - skip) + v);
      }
    }
  }

  // Stores the vectors in `staged`, with zeros for bytes outside the tensor. Returns the index of
  // the span's first byte in `staged`.
  __device__ int store(const Span& span, bool at_edge, uint4* staged) const {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int v = j * kWarpSize + lane_index();
      if (v >= begin && v < end) staged[v] = read[j];
    }
    if (at_edge && (begin > 0 || end < vectors(span))) {
      const uint8_t* source = span.tensor + (span.from - skip);
      const int64_t length = span.tensor_bytes - span.from + skip;
      for (int i = lane_index(); i < vectors(span) * kVectorBytes; i += kWarpSize) {
        if (i >= begin * kVectorBytes && i < end * kVectorBytes) continue;
        reinterpret_cast<uint8_t*>(staged)[i] = i >= skip && i < length ? source[i] : 0;
      }
    }
    __syncwarp();
    return skip;
  }

 private:
  __device__ int vectors(const Span& span) const {
    return (skip + span.count + kOverread) / kVectorBytes + 1;
  }
};

// Reads the scale at the end of a row, at any address.
__device__ inline float scale_at(const uint8_t* bytes) {
  return to_float(BFloat16{static_cast<uint16_t>(bytes[0] | bytes[1] << 8)});
}

}  // namespace dct::cuda
