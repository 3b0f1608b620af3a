#pragma once

// Vectorized loads and stores. Streamed data is used once and not again before it has left the
// caches, so it is marked evict-first.

#include <cstring>

#include "platform.cuh"

namespace dct::cuda {

template <int kBytes>
struct VectorOfBytes;
template <>
struct VectorOfBytes<2> {
  using Type = unsigned short;
};
template <>
struct VectorOfBytes<4> {
  using Type = unsigned;
};
template <>
struct VectorOfBytes<8> {
  using Type = uint2;
};
template <>
struct VectorOfBytes<16> {
  using Type = uint4;
};

// The vector type of N elements of T, up to 16 bytes.
template <typename T, int N>
using Vector = typename VectorOfBytes<sizeof(T) * N>::Type;

template <typename T, int N>
__device__ void stream_in(const T* address, T (&x)[N]) {
  const Vector<T, N> vector = __ldcs(reinterpret_cast<const Vector<T, N>*>(address));
  memcpy(x, &vector, sizeof(vector));
}

template <typename T, int N>
__device__ void stream_out(T* address, const T (&x)[N]) {
  Vector<T, N> vector;
  memcpy(&vector, x, sizeof(vector));
  __stcs(reinterpret_cast<Vector<T, N>*>(address), vector);
}

// Whether vectors of `bytes` bytes may start at this address.
inline bool is_aligned(const void* address, size_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

}  // namespace dct::cuda
