"""Shared device functions for arithmetic with the same bits as in the other backends.

Integer arithmetic replaces casts whose results differ. The bits of NaN depend on the device, and
Triton's interpreter truncates to bfloat16 instead of rounding.
"""

import triton
import triton.language as tl

FLOAT32_NAN = tl.constexpr(0x7FC00000)  # kernels write no other NaN
FLOAT32_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def is_finite(x):
    return (x.to(tl.int32, bitcast=True) & FLOAT32_INFINITY) != FLOAT32_INFINITY


@triton.jit
def magnitude_key(x):
    """int32 keys that order float32 by magnitude. NaN ranks as infinity."""
    return tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, FLOAT32_INFINITY)


@triton.jit
def to_float(x):
    """Convert x of any dtype to float32, exactly."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round float32 to `dtype`, to nearest even. Every NaN becomes the positive quiet NaN."""
    bits = x.to(tl.int32, bitcast=True)
    if dtype == tl.float32:
        rounded = tl.where(x != x, FLOAT32_NAN, bits)
    elif dtype == tl.bfloat16:
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, FLOAT32_NAN >> 16, rounded).to(tl.int16)
    else:
        rounded = tl.where(x != x, 0x7E00, x.to(tl.float16).to(tl.int16, bitcast=True)).to(tl.int16)
    return rounded.to(dtype, bitcast=True)


@triton.jit
def round_saturating(x, dtype: tl.constexpr):
    """Like `round_to` for float32 or bfloat16, but a finite x stays finite."""
    rounded = round_to(x, dtype)
    if dtype == tl.bfloat16:
        bits = rounded.to(tl.int16, bitcast=True)
        overflowed = ((bits & 0x7FFF) == 0x7F80) & is_finite(x)
        rounded = (bits - overflowed.to(tl.int16)).to(dtype, bitcast=True)
    return rounded


@triton.jit
def add_gradient(old, grad, inv_scale, i, mask):
    """old + grad * inv_scale at the elements i. Both old and inv_scale may be None."""
    acc = to_float(tl.load(grad + i, mask=mask))
    if inv_scale is not None:
        acc *= tl.load(inv_scale)
    if old is not None:
        acc = old + acc
    return acc


@triton.jit
def load_accumulated(residual, grad, inv_scale, i, mask):
    """residual + grad * inv_scale at the elements i. inv_scale may be None."""
    return add_gradient(tl.load(residual + i, mask=mask), grad, inv_scale, i, mask)


@triton.jit
def hash32(seed, range_index, index):
    """The hash that docs/reference/ops.md specifies, in uint32."""
    x = (seed * 0x9E3779B1) ^ (range_index * 0x85EBCA77) ^ (index * 0xC2B2AE3D)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)
