#pragma once

// Shared headers are compiled by the host compiler and by nvcc; only nvcc knows the two attributes.
#if defined(__CUDACC__) || defined(__HIPCC__)
#define DCT_HOST_DEVICE __host__ __device__
#else
#define DCT_HOST_DEVICE
#endif

#if defined(__BYTE_ORDER__)
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the payload is little-endian");
#endif
