"""Device functions for codes and scales, shared by the ops on rows and payloads."""

import triton
import triton.language as tl

from ._numeric import round_saturating

ROUND_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2**23; adding it rounds to an integer
UNIT_BITS = tl.constexpr(22)  # the largest magnitude is below 2**UNIT_BITS units
SMALLEST_NORMAL = tl.constexpr(0x0080)  # bfloat16


@triton.jit
def scale_bits(exact):
    """The bits of the bfloat16 scale that is sent, as int32: finite, and normal or 0."""
    scale = round_saturating(exact, tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(scale < SMALLEST_NORMAL, 0, scale)


@triton.jit
def units(top):
    """Return 1 / unit and unit, normal powers of two. `top`: the bits of the largest magnitude."""
    exponent = tl.maximum(top >> 23, UNIT_BITS)
    in_one = (-exponent + (253 + UNIT_BITS)) << 23
    unit = (exponent - (UNIT_BITS - 1)) << 23
    return in_one.to(tl.float32, bitcast=True), unit.to(tl.float32, bitcast=True)


@triton.jit
def ternary_code(byte, digit):
    # The byte is a balanced base-3 number. Adding 121 turns its digits -1, 0, 1 into 0, 1, 2.
    byte = tl.minimum((byte + 121) & 255, 242)
    # Multiply by 65,536 / 3^digit, rounded up, instead of dividing. The result is exact.
    first = tl.where(digit == 0, 65536, tl.where(digit == 1, 21846, 7282))
    inverse = tl.where(digit < 3, first, tl.where(digit == 3, 2428, 810))
    return (byte * inverse >> 16) % 3 - 1
