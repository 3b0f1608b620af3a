"""row_quantize, row_dequantize and row_dequantize_sum, one row at a time."""

import functools
import math
from fractions import Fraction

import numpy as np

from . import floats

F32 = np.float32
FORMATS = ("int8", "int4", "sign")  # dense payloads also encode groups in "ternary"
NAN, SMALLEST_NORMAL = 0x7FC0, 0x0080  # raw bfloat16


def row_bytes(width, format):
    return math.ceil(width / {"int8": 1, "int4": 2, "ternary": 5, "sign": 8}[format]) + 2


def row_quantize(x, format):
    """Return uint8 [rows, bytes]; `x` is a float32 array [rows, width]."""
    raw = b"".join(_quantize(row.tobytes(), format) for row in x)
    return np.frombuffer(raw, np.uint8).reshape(len(x), row_bytes(x.shape[1], format))


def row_dequantize(rows, width, format, dtype):
    """Return raw bits [rows, width]; `rows` are uint8 [rows, bytes] with any bytes."""
    out = np.empty((len(rows), width), np.float64)
    for row, values in zip(rows.tolist(), out, strict=True):
        (scale,) = floats.widen([row[-2] + 256 * row[-1]], "bfloat16")
        codes = [code for byte in row[:-2] for code in codes_of(byte, format)][:width]
        with np.errstate(invalid="ignore"):
            values[:] = np.array(codes, np.float64) * scale  # exact in float64
    with np.errstate(over="ignore"):
        return floats.narrow(out.astype(F32), dtype)


def row_dequantize_sum(rows, width, format, dtype):
    """Return raw bits [rows, width]; `rows` are uint8 [ranks, rows, bytes] with any bytes."""
    total, *others = (
        floats.widen(row_dequantize(message, width, format, "float32"), "float32")
        for message in rows
    )
    with np.errstate(invalid="ignore", over="ignore"):
        for more in others:
            total = total + more
        return floats.narrow(total, dtype)


@functools.lru_cache(50000)  # for all backends, which quantize the same rows
def _quantize(row, format):
    row = np.frombuffer(row, F32)
    codes, scale = [0] * len(row), NAN
    if np.isfinite(row).all():
        codes, scale = {"ternary": _ternary, "sign": _sign}.get(format, _integers)(row, format)
        if scale == 0:
            codes = [0] * len(row)
    return _pack(codes, format) + scale.to_bytes(2, "little")


def _scale(x):
    """Round to a finite raw bfloat16; subnormal results become 0."""
    (raw,) = floats.narrow(np.array([x], F32), "bfloat16", saturate=True).tolist()
    return raw if raw >= SMALLEST_NORMAL else 0


def _integers(row, format):
    levels = {"int8": 127, "int4": 7}[format]
    scale = _scale(F32(np.abs(row).max()) / F32(levels))
    if scale == 0:
        return [0] * len(row), 0
    inverse = F32(1) / floats.widen([scale], "bfloat16")[0]
    codes = [round(float(x)) for x in row * inverse]  # Python rounds ties to even
    assert max(map(abs, codes)) <= levels
    return codes, scale


def _in_units(row):
    """Magnitudes and the unit of their sums, in multiples of the smallest subnormal, 2**-149."""
    bits = (row.view(np.uint32) & 0x7FFFFFFF).tolist()
    magnitudes = [(b & 0x7FFFFF | 0x800000) << (b >> 23) - 1 if b >> 23 else b for b in bits]
    # The unit is 2**-21 times a power of two, but at least 2**-126. The power of two is the largest
    # one that does not exceed the largest magnitude.
    return magnitudes, 1 << max(max(magnitudes).bit_length() - 1 - 21, 149 - 126)


def _mean(units):
    return F32(sum(units)) / F32(len(units)) if units else F32(0)


def _sign(row, format):
    magnitudes, unit = _in_units(row)
    mean = _mean([m // unit for m in magnitudes])
    return [1 if x < 0 else 0 for x in row.tolist()], _scale(mean * F32(unit * 2.0**-149))


def _ternary(row, format):
    magnitudes, unit = _in_units(row)
    threshold = Fraction(float(F32(0.75) * _mean([m // unit for m in magnitudes]))) * unit
    kept = [m > math.floor(threshold) for m in magnitudes]
    mean = _mean([m // unit for m, keep in zip(magnitudes, kept, strict=True) if keep])
    codes = [(x > 0) - (x < 0) if keep else 0 for x, keep in zip(row.tolist(), kept, strict=True)]
    return codes, _scale(mean * F32(unit * 2.0**-149))


def _pack(codes, format):
    each, base = {"int8": (1, 256), "int4": (2, 16), "ternary": (5, 3), "sign": (8, 2)}[format]
    packed = []
    for begin in range(0, len(codes), each):
        digits = codes[begin : begin + each]
        if format == "int4":
            digits = [code % 16 for code in digits]
        packed.append(sum(code * base**i for i, code in enumerate(digits)) % 256)
    return bytes(packed)


@functools.cache
def codes_of(byte, format):
    """The codes in a byte, which may have any value."""
    signed = byte - 256 if byte > 127 else byte
    if format == "int8":
        return [signed]
    if format == "int4":
        return [n - 16 if n > 7 else n for n in (byte % 16, byte // 16)]
    if format == "sign":
        return [-1 if byte >> i & 1 else 1 for i in range(8)]
    # 122 to 127 and -128 to -122 are not sums of five codes. They decode like 121.
    number = signed if -121 <= signed <= 121 else 121
    return [(number + 121) // 3**i % 3 - 1 for i in range(5)]
