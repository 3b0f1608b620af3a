#pragma once

// Adds the entries of a payload's rows to sums in registers. A lane sums the entries whose codes it
// loads, 16 bytes at a time. So a sum moves only once to the lane that writes it, not once per
// rank. A code becomes a float when its bits are put below the exponent of 2^23.

#include "entry_rows.cuh"
#include "row_codes.cuh"

namespace dct::cuda {

// The index of a vector of four sums in the staging memory, which moves sums to other lanes.
// One unused vector after every 2^kShift vectors avoids bank conflicts in stores and loads.
template <int kShift>
__host__ __device__ constexpr int place_of(int vector) {
  return vector + (vector >> kShift);
}

template <int kShift>
__device__ void stage_sums(float4* staging, int vector, const float* sums) {
  staging[place_of<kShift>(vector)] = make_float4(sums[0], sums[1], sums[2], sums[3]);
}

template <int kShift>
__device__ void take_sums(const float4* staging, RowEntries& x) {
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
    const float4 four = staging[place_of<kShift>(v * kWarpSize) + place_of<kShift>(lane_index())];
    memcpy(x[v], &four, sizeof(four));
  }
}

// Sums of kRows rows, which a warp holds in registers. Members:
//   Loaded           the data that a lane loads of a payload's rows
//   kInFlight        payloads loaded before the first is added
//   kStagedRow       vectors of shared memory per row, through which sums move to other lanes
//   load(row, rows)  loads the first `rows` of the kRows rows
//   add(loaded, used, staging)  adds payloads in order: payload k if bit k of `used` is set
//   stage(staging)   moves the sums to the staging memory
//   take(staging, x) reads the sums of a row, as vectors of the row
// The primary template handles one row: the codes of float32, bfloat16, int8 and int4 are 8 to 1
// vectors of 16 bytes per lane. sum_trits.cuh has the specialization for ternary.
template <PayloadFormat kFormat>
struct RowSums {
  static constexpr int kRows = 1;
  static constexpr int kLoads = row_code_bytes(kFormat) / (16 * kWarpSize);
  static constexpr int kEach = kRow / kWarpSize / kLoads;        // entries per load
  static constexpr int kInFlight = kLoads > 1 ? 8 / kLoads : 4;  // payloads
  static constexpr bool kStaged = kEach > kVectorElements;
  static constexpr int kStagedRow = kStaged ? place_of<3>(kRow / kVectorElements) : 0;

  struct Loaded {
    uint4 codes[kLoads];
    uint16_t scale;  // the scale of group lane / 2
  };
  float sums[kLoads][kEach] = {};
  UnitFloats unit_float;

  __device__ static Loaded load(const uint8_t* row, int) {
    Loaded loaded;
    const int lane = lane_index();
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      loaded.codes[j] = __ldcs(reinterpret_cast<const uint4*>(row) + j * kWarpSize + lane);
    }
    if constexpr (has_scales(kFormat)) {
      loaded.scale =
          __ldcs(reinterpret_cast<const unsigned short*>(row + row_code_bytes(kFormat)) + lane / 2);
    }
    return loaded;
  }

  template <int N>
  __device__ void add(const Loaded (&loaded)[N], uint32_t used, float4*) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if ((used >> k & 1) != 0) add(loaded[k]);
    }
  }

  __device__ void add(const Loaded& loaded) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const uint32_t words[4] = {loaded.codes[j].x, loaded.codes[j].y, loaded.codes[j].z,
                                 loaded.codes[j].w};
      float scale = 0.0f;
      if constexpr (has_scales(kFormat)) {
        uint32_t bits = loaded.scale;
        if constexpr (kLoads > 1) {
          const int group = (j * kWarpSize + lane_index()) * kEach / kScaled;
          bits = __shfl_sync(kFullWarp, bits, 2 * group);
        }
        scale = bits_to_float(bits << 16);
      }
      // A code times a scale is exact unless it overflows, so fusing does not change the rounding.
      if (has_scales(kFormat) && fabsf(scale) < kNeverOverflows) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const float code = value(words[e * 4 / kEach], e % (kEach / 4));
          sums[j][e] = __fmaf_rn(code, scale, sums[j][e]);
        }
        continue;
      }
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const float code = value(words[e * 4 / kEach], e % (kEach / 4));
        sums[j][e] = __fadd_rn(sums[j][e], has_scales(kFormat) ? __fmul_rn(code, scale) : code);
      }
    }
  }

  // Entry e of a word, before multiplication by its scale.
  __device__ float value(uint32_t word, int e) const {
    if constexpr (kFormat == PayloadFormat::kFloat32) {
      return bits_to_float(word);
    } else if constexpr (kFormat == PayloadFormat::kBFloat16) {
      return bits_to_float(e == 0 ? word << 16 : word & 0xffff0000);
    } else if constexpr (kFormat == PayloadFormat::kInt8) {
      return __fsub_rn(unit_float(e, word ^ 0x80808080), kUnit + 128.0f);
    } else {
      const uint32_t offset = word ^ 0x88888888;  // codes + 8
      const uint32_t nibbles = (e % 2 == 0 ? offset : offset >> 4) & 0x0f0f0f0f;
      return __fsub_rn(unit_float(e / 2, nibbles), kUnit + 8.0f);
    }
  }

  __device__ void stage(float4* staging) const {
    if constexpr (kStaged) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
#pragma unroll
        for (int e = 0; e < kEach; e += kVectorElements) {
          const int entry = (j * kWarpSize + lane_index()) * kEach + e;
          stage_sums<3>(staging, entry / kVectorElements, &sums[j][e]);
        }
      }
      __syncwarp();
    }
  }

  __device__ void take(const float4* staging, RowEntries& x) const {
    if constexpr (kStaged) {
      take_sums<3>(staging, x);
    } else {
      memcpy(x, sums, sizeof(sums));
    }
  }
};

}  // namespace dct::cuda
