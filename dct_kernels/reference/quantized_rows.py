"""Eager ops on quantized rows. docs/reference/ops.md specifies the formats.

The ops on dense payloads also encode groups in "ternary" with these functions.
"""

import torch
from torch import Tensor

from ..row_layout import CODES_PER_BYTE, code_bytes
from .rounding import INFINITY_KEY, magnitude_key, round_to

LEVELS = {"int8": 127, "int4": 7}  # the code of the largest magnitude of a row
MEAN_BITS = 22  # bits of a magnitude in fixed point, for the means
SMALLEST_NORMAL = 2.0**-126


def row_quantize(x: Tensor, format: str) -> Tensor:
    x = x.to(torch.float32)
    top = magnitude_key(x).amax(1, keepdim=True)
    finite = top < INFINITY_KEY
    # A row with a NaN or an infinity gets the scale NaN and codes of 0.
    x, top = torch.where(finite, x, 0.0), torch.where(finite, top, 0)
    if format in LEVELS:
        scale = _scale(_divide(top.view(torch.float32), LEVELS[format]))
        codes = (x * torch.where(scale > 0, 1 / scale, 0.0)).round()
    else:
        fixed, unit = _fixed_point(x, top)
        mean = _mean(fixed, torch.full_like(top, x.shape[1]))
        kept = torch.ones_like(fixed, dtype=torch.bool)
        if format == "ternary":
            kept = fixed > 0.75 * mean
            mean = _mean(torch.where(kept, fixed, 0.0), kept.sum(1, keepdim=True))
        scale = _scale(mean * unit)
        codes = torch.where(kept & (scale > 0), x.sign(), 0.0)
    scale = torch.where(finite, scale, torch.nan)
    return torch.cat([_pack(codes.to(torch.int8), format), _to_bytes(scale)], 1)


def row_dequantize(rows: Tensor, width: int, format: str, dtype: torch.dtype) -> Tensor:
    codes = _unpack(rows[:, :-2], format)[:, :width]
    return round_to(codes.to(torch.float32) * _from_bytes(rows[:, -2:]), dtype)


def row_dequantize_sum(rows: Tensor, width: int, format: str, dtype: torch.dtype) -> Tensor:
    total, *others = (row_dequantize(message, width, format, torch.float32) for message in rows)
    for more in others:
        total += more
    return round_to(total, dtype)


def _scale(x: Tensor) -> Tensor:
    """Round to a bfloat16 scale, which is finite and normal or 0, and return it as float32."""
    scale = round_to(x, torch.bfloat16, saturate=True).to(torch.float32)
    return torch.where(scale < SMALLEST_NORMAL, 0.0, scale)


def _to_bytes(scale: Tensor) -> Tensor:
    """float32 [B, 1] with bfloat16 values -> their bytes [B, 2], little-endian."""
    bits = round_to(scale, torch.bfloat16).view(torch.int16).to(torch.int32)
    return torch.cat([bits & 255, bits >> 8 & 255], 1).to(torch.uint8)


def _from_bytes(scale: Tensor) -> Tensor:
    scale = scale.to(torch.int32)
    return (scale[:, :1] << 16 | scale[:, 1:] << 24).view(torch.float32)


def _fixed_point(x: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Return |x| / `unit` and `unit` [B, 1]. All quotients are below 2**MEAN_BITS.

    `unit` and its inverse are normal powers of two. If all |x| of a row are below 2**-104, its unit
    is 2**-126.
    """
    exponent = (top >> 23).clamp(min=MEAN_BITS)
    units_to_one = (253 + MEAN_BITS - exponent) << 23
    unit = (exponent - (MEAN_BITS - 1)) << 23
    return x.abs() * units_to_one.view(torch.float32), unit.view(torch.float32)


def _mean(fixed: Tensor, count: Tensor) -> Tensor:
    """The mean of truncated magnitudes [B, d]. Integer sums do not depend on the order."""
    total = fixed.to(torch.int64).sum(1, keepdim=True)
    return _divide(total.to(torch.float32), count.clamp(min=1))


def _divide(x: Tensor, by: Tensor | int) -> Tensor:
    """Divide with correct rounding. On CUDA, x / number would multiply by the reciprocal."""
    return x / (torch.zeros_like(x) + by)


def _pack(codes: Tensor, format: str) -> Tensor:
    """int8 [B, d] -> uint8 [B, code_bytes]. Codes past the width are 0."""
    if format == "int8":
        return codes.view(torch.uint8)
    each = CODES_PER_BYTE[format]
    nbytes = code_bytes(codes.shape[1], format)
    codes = torch.nn.functional.pad(codes, (0, nbytes * each - codes.shape[1]))
    codes = codes.view(codes.shape[0], nbytes, each)
    if format == "int4":
        codes = codes & 15
    if format == "sign":
        codes = (codes < 0).to(torch.int8)
    packed = (codes.to(torch.int32) * _weights(format, codes.device)).sum(2) & 255
    return packed.to(torch.uint8)


def _unpack(packed: Tensor, format: str) -> Tensor:
    """uint8 [B, code_bytes] -> int8 or int32 [B, >= d]. All bytes can be decoded."""
    if format == "int8":
        return packed.view(torch.int8)
    packed = packed.to(torch.int32).unsqueeze(2)
    weights = _weights(format, packed.device)
    if format == "ternary":
        # The byte is a balanced base-3 number. Adding 121 turns its digits -1, 0, 1 into 0, 1, 2.
        digits = ((packed + 121) & 255).clamp(max=242) // weights % 3
        return (digits - 1).flatten(1)
    digits = packed // weights % (16 if format == "int4" else 2)
    codes = 1 - 2 * digits if format == "sign" else (digits ^ 8) - 8
    return codes.flatten(1)


def _weights(format: str, device: torch.device) -> Tensor:
    """The weight of each code in its byte."""
    base = {"int4": 16, "ternary": 3, "sign": 2}[format]
    return base ** torch.arange(CODES_PER_BYTE[format], dtype=torch.int32, device=device)
