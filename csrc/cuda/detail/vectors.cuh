#pragma once

// Several elements by one instruction. What streams through is read or written once and not again
// before far more than a cache has passed, so it is marked to be evicted first.

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

// N elements of T, up to 16 bytes, as the instruction moves them.
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

// Whether vectors of `bytes` may start at this address.
inline bool is_aligned(const void* address, size_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

}  // namespace dct::cuda
