#pragma once

// Quantized rows in shared memory: row_dequantize and row_dequantize_sum. A row is decoded by 2 to
// 32 lanes. Rows have no alignment, but those of a warp are contiguous, so the warp copies their
// bytes to shared memory by vectors of 16 bytes. There a lane reads the codes of some columns from
// any byte.

#include "row_codes.cuh"

namespace dct::cuda {

constexpr int kStagedBytes = sizeof(uint4);  // of a vector
constexpr int kBusyColumns = 32;             // per lane: wider rows have more lanes
constexpr int kLaneColumns = 40;             // per lane at a time: whole bytes of every format
constexpr int kWarpColumns = kWarpSize * kLaneColumns;

// Vectors that hold a warp's rows of a format, with what precedes and follows the bytes in the
// first and the last. `kOverread` bytes are read past the first byte of some codes.
template <RowFormat kFormat, int kOverread>
constexpr int kStagedVectors =
    (kWarpColumns / codes_per_byte(kFormat) + kScaleBytes + kOverread) / kStagedBytes + 2;

// How rows are shared out among lanes.
struct RowLanes {
  int log_lanes;  // of a row
  int64_t parts;  // of at most 2^log_lanes * kLaneColumns columns

  explicit RowLanes(int64_t width) : log_lanes(1) {
    while (log_lanes < 5 && (kBusyColumns << log_lanes) < width) ++log_lanes;
    parts = (width - 1) / (kLaneColumns << log_lanes) + 1;
  }
};

// Bytes of a tensor on their way to shared memory.
template <int kVectors, int kOverread>
struct StagedBytes {
  static constexpr int kLoads = (kVectors + kWarpSize - 1) / kWarpSize;
  uint4 read[kLoads];

  // Loads `count` of the tensor's bytes, `from` on, and those around them that share their vectors.
  // By one warp.
  __device__ void load(const uint8_t* tensor, int64_t tensor_bytes, int64_t from, int count) {
    const Place place(tensor, tensor_bytes, from, count);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int v = j * kWarpSize + lane_index();
      if (v >= place.begin && v < place.end) {
        read[j] = __ldcs(reinterpret_cast<const uint4*>(place.source) + v);
      }
    }
  }

  // Stores them, with zeros outside the tensor, and returns where they begin. Takes the arguments
  // of load().
  __device__ int store(const uint8_t* tensor, int64_t tensor_bytes, int64_t from, int count,
                       uint4* staged) const {
    const Place place(tensor, tensor_bytes, from, count);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int v = j * kWarpSize + lane_index();
      if (v >= place.begin && v < place.end) staged[v] = read[j];
    }
    if (place.begin > 0 || place.end < place.vectors) {
      const int64_t length = tensor_bytes - from + place.skip;
      for (int i = lane_index(); i < place.vectors * kStagedBytes; i += kWarpSize) {
        if (i >= place.begin * kStagedBytes && i < place.end * kStagedBytes) continue;
        const bool inside = i >= place.skip && i < length;
        reinterpret_cast<uint8_t*>(staged)[i] = inside ? place.source[i] : 0;
      }
    }
    __syncwarp();
    return place.skip;
  }

 private:
  struct Place {
    int skip, vectors;  // bytes before the first, and vectors from there on
    int begin, end;     // vectors inside the tensor
    const uint8_t* source;

    __device__ Place(const uint8_t* tensor, int64_t tensor_bytes, int64_t from, int count) {
      skip = static_cast<int>(reinterpret_cast<uintptr_t>(tensor + from) % kStagedBytes);
      vectors = (skip + count + kOverread) / kStagedBytes + 1;
      source = tensor + (from - skip);
      begin = from < skip ? 1 : 0;
      end = static_cast<int>(min((tensor_bytes - from + skip) / kStagedBytes, int64_t{vectors}));
    }
  };
};

// The scale that ends a row, from any byte.
__device__ inline float scale_at(const uint8_t* bytes) {
  return to_float(BFloat16{static_cast<uint16_t>(bytes[0] | bytes[1] << 8)});
}

// Unpacks the trits of a row's first `columns` columns to one per byte. By `lanes` lanes.
__device__ inline void unpack_trits(const uint8_t* row, int columns, int lane, int lanes,
                                    uint8_t* trits) {
  for (int i = lane; i * kTrits < columns; i += lanes) {
    unpack_byte<RowFormat::kTernary>(row[i],
                                     [&](int k, uint32_t trit) { trits[i * kTrits + k] = trit; });
  }
  __syncwarp();
}

}  // namespace dct::cuda
