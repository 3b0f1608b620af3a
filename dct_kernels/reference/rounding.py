"""Bit-exact conversions. Integer arithmetic replaces casts that differ between devices: some casts
flush subnormals, some truncate, and some keep the payload of a NaN."""

import torch

FLOAT32_NAN = 0x7FC00000
INFINITY_KEY = 0x7F800000


def round_to(x: torch.Tensor, dtype: torch.dtype, saturate: bool = False) -> torch.Tensor:
    """Round float32 to `dtype`, to nearest even. Every NaN becomes the positive quiet NaN.

    With `saturate`, a finite x that would round to infinity becomes the largest finite value.
    """
    nan = x.isnan()
    if dtype == torch.float32:
        return torch.where(nan, x.new_tensor(FLOAT32_NAN, dtype=torch.int32).view(dtype), x)
    if dtype == torch.float16:
        return torch.where(nan, torch.nan, x).to(torch.float16)
    bits = x.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    if saturate:
        overflowed = (rounded & 0x7FFF) == 0x7F80
        rounded = torch.where(overflowed & x.isfinite(), rounded - 1, rounded)
    rounded = torch.where(nan, FLOAT32_NAN >> 16, rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)


def magnitude_key(x: torch.Tensor) -> torch.Tensor:
    """int32 keys that order float32 by magnitude. NaN ranks as infinity."""
    return (x.view(torch.int32) & 0x7FFFFFFF).clamp(max=INFINITY_KEY)
