// intrinsics.h -- the device functions that csrc/cuda uses.
#pragma once

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((uint64_t{high} << 32 | low) << (shift & 31)) >> 32);
}
// Of both halves of a word.
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  const unsigned low = std::max(a & 0xffff, b & 0xffff);
  return std::max(a >> 16, b >> 16) << 16 | low;
}
inline unsigned __viaddmin_s16x2_relu(unsigned a, unsigned b, unsigned c) {
  const auto half = [](unsigned a, unsigned b, unsigned c) {
    const auto sum = static_cast<int16_t>(a + b);
    return static_cast<unsigned>(std::clamp<int>(sum, 0, static_cast<int16_t>(c)));
  };
  return half(a >> 16, b >> 16, c >> 16) << 16 | half(a, b, c);
}
inline int __ffs(int x) { return __builtin_ffs(x); }

// Compiled with -ffp-contract=off, so each of these rounds once, as on a GPU.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }

template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, T value) {
  *address = value;
}

inline void __syncthreads(emulator::Place place = emulator::Place::here()) {
  emulator::barrier(place);
}

namespace emulator {

template <typename T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "a shuffle moves one register");
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}
template <typename T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

template <typename T>
T shuffle(unsigned mask, Collective kind, Place place, T value, unsigned source) {
  return from_word<T>(collective(mask, kind, place, to_word(value), source));
}

inline unsigned lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}

}  // namespace emulator

inline void __syncwarp(unsigned mask = 0xffffffff,
                       emulator::Place place = emulator::Place::here()) {
  emulator::collective(mask, emulator::Collective::kSync, place, 0);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, emulator::Place place = emulator::Place::here()) {
  return emulator::shuffle(mask, emulator::Collective::kShuffle, place, value, source & 31);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta,
                 emulator::Place place = emulator::Place::here()) {
  const unsigned lane = emulator::lane();
  return emulator::shuffle(mask, emulator::Collective::kShuffleUp, place, value,
                           lane >= delta ? lane - delta : lane);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask,
                  emulator::Place place = emulator::Place::here()) {
  return emulator::shuffle(mask, emulator::Collective::kShuffleXor, place, value,
                           (emulator::lane() ^ lane_mask) & 31);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              emulator::Place place = emulator::Place::here()) {
  return static_cast<unsigned>(
      emulator::collective(mask, emulator::Collective::kBallot, place, predicate != 0));
}
inline int __any_sync(unsigned mask, int predicate,
                      emulator::Place place = emulator::Place::here()) {
  return emulator::collective(mask, emulator::Collective::kAny, place, predicate != 0) != 0;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value,
                                  emulator::Place place = emulator::Place::here()) {
  return static_cast<unsigned>(
      emulator::collective(mask, emulator::Collective::kReduceAdd, place, value));
}

// Atomics are relaxed, as on a GPU, and points where another thread may come in between.
template <typename T>
T atomicAdd(T* address, std::common_type_t<T> value) {
  emulator::schedule_point();
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline int32_t atomicExch(int32_t* address, int32_t value) {
  emulator::schedule_point();
  return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicOr(T* address, std::common_type_t<T> value) {
  emulator::schedule_point();
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
