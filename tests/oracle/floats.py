"""Float formats: rounding float32 to 16 bits, and the NaN that payloads contain."""

import numpy as np

BITS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
NAN = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}


def widen(bits, dtype):
    """Convert raw bits to float32 numbers."""
    bits = np.ascontiguousarray(bits, BITS[dtype])
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def narrow(x, dtype, saturate=False):
    """Round float32 numbers, ties to even, and return raw bits; any NaN becomes `NAN[dtype]`."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype == "float32":
        bits = x.view(np.uint32).copy()
    elif dtype == "bfloat16":
        bits = _nearest_bfloat16(x, saturate)
    else:
        with np.errstate(over="ignore"):
            bits = x.astype(np.float16).view(np.uint16)
    bits[np.isnan(x)] = NAN[dtype]
    return bits


def _nearest_bfloat16(x, saturate):
    """Choose the nearer neighbor in float64. 2**128, whose code is inf's, follows the largest."""
    bits = x.view(np.uint32)
    magnitude = np.where(np.isfinite(x), bits & 0x7FFFFFFF, 0)
    below = (magnitude >> 16).astype(np.uint16)
    exact = magnitude.astype(np.uint32).view(np.float32).astype(np.float64)
    to_below, to_above = exact - _number(below), _number(below + np.uint16(1)) - exact
    up = (to_above < to_below) | ((to_above == to_below) & (below % 2 == 1))
    code = below + up.astype(np.uint16)
    if saturate:
        code[code == 0x7F80] = 0x7F7F
    code[np.isinf(x)] = 0x7F80
    return code | ((bits >> 16) & 0x8000).astype(np.uint16)


def _number(code):
    return np.where(code == 0x7F80, 2.0**128, widen(code, "bfloat16").astype(np.float64))


def accumulate(residual, grad, inv_scale):
    """residual + grad * inv_scale in float32, product and sum rounded separately.

    `residual` and `inv_scale` may be None.
    """
    with np.errstate(all="ignore"):
        scaled = grad if inv_scale is None else grad * np.float32(inv_scale)
        return scaled if residual is None else residual + scaled


def factor(scale, out_scale):
    """scale * out_scale in float32; `out_scale` may be None."""
    with np.errstate(all="ignore"):
        return np.float32(scale) * np.float32(1 if out_scale is None else out_scale)
