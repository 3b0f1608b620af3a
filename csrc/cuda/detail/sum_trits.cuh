#pragma once

// RowSums for ternary payloads.

#include "sum_codes.cuh"

namespace dct::cuda {

// Sums two rows, because 30 lanes load them together in whole sectors. A lane sums one group, whose
// 13 bytes it reads from shared memory.
template <>
struct RowSums<PayloadFormat::kTernary> {
  static constexpr int kRows = 2;
  static constexpr int kInFlight = 4;  // payloads
  static constexpr int kStagedRow = place_of<4>(kRow / kVectorElements);
  static constexpr int kBytes = row_bytes(PayloadFormat::kTernary);
  static constexpr int kGroupBytes = scaled_code_bytes(PayloadFormat::kTernary);
  static_assert(kRows * kBytes <= 16 * kWarpSize && kRows * kScales == kWarpSize);

  using Loaded = uint4;
  float sums[kScaled] = {};
  UnitFloats unit_float;

  __device__ static Loaded load(const uint8_t* row, int rows) {
    const int lane = lane_index();
    if (lane * 16 >= rows * kBytes) return make_uint4(0, 0, 0, 0);  // all staged bytes are read
    return __ldcs(reinterpret_cast<const uint4*>(row) + lane);
  }

  template <int N>
  __device__ void add(const Loaded (&loaded)[N], uint32_t used, float4* staging) {
    auto* words = reinterpret_cast<uint4*>(staging);
    static_assert(N * kWarpSize <= kRows * kStagedRow);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if ((used >> k & 1) != 0) words[k * kWarpSize + lane_index()] = loaded[k];
    }
    __syncwarp();
#pragma unroll 1
    for (int k = 0; k < N; ++k) {
      if ((used >> k & 1) != 0) add(reinterpret_cast<const uint8_t*>(words + k * kWarpSize));
    }
    __syncwarp();
  }

  __device__ void add(const uint8_t* rows) {
    const int group = lane_index() % kScales;
    const uint8_t* row = rows + lane_index() / kScales * kBytes;
    const float scale = bits_to_float(
        uint32_t{reinterpret_cast<const uint16_t*>(row + kScales * kGroupBytes)[group]} << 16);
    const auto offset = static_cast<unsigned>(row - rows) + group * kGroupBytes;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(rows) + offset / 4;
    const uint32_t from = 0x3210 + offset % 4 * 0x1111;
#pragma unroll
    for (int first = 0; first < kGroupBytes; first += 4) {
      const uint32_t next = first + 4 < kGroupBytes ? words[first / 4 + 1] : 0;
      const uint32_t bytes = __byte_perm(words[first / 4], next, from);
      // Adds 121 to every byte separately. The results are 0 to 242.
      const uint32_t moved = ((bytes & 0x7f7f7f7f) + 0x79797979) ^ (bytes & 0x80808080);
#pragma unroll
      for (int b = 0; b < 4 && first + b < kGroupBytes; ++b) {
        add_byte(unit_float(b, moved), scale, 5 * (first + b));
      }
    }
  }

  // Adds each of a byte's five digits in balanced base 3, times `scale`, to its own sum. A digit is
  // the difference to the nearest multiple of 3. A third of an integer is never halfway between two
  // integers, so an error in its last bit does not change the rounded integer. The other products
  // are exact, so a fused multiply-add rounds like separate operations.
  __device__ void add_byte(float with_unit, float scale, int entry) {
    float number = fminf(__fsub_rn(with_unit, kUnit + 121.0f), 121.0f);
#pragma unroll
    for (int i = 0; i < 5 && entry + i < kScaled; ++i) {
      float digit = number;
      if (i < 4) {
        number = __fsub_rn(__fmaf_rn(number, 1.0f / 3, kRoundToInteger), kRoundToInteger);
        digit = __fmaf_rn(-3.0f, number, digit);
      }
      sums[entry + i] = __fmaf_rn(digit, scale, sums[entry + i]);
    }
  }

  __device__ void stage(float4* staging) const {
#pragma unroll
    for (int e = 0; e < kScaled; e += kVectorElements) {
      stage_sums<4>(staging, (lane_index() * kScaled + e) / kVectorElements, &sums[e]);
    }
    __syncwarp();
  }

  __device__ void take(const float4* staging, RowEntries& x) const { take_sums<4>(staging, x); }
};

}  // namespace dct::cuda
