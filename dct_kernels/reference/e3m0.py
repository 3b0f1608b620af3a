"""Values of payload version 2: plus or minus a power of two, in four bits, over a scale.

A scale is a power of two, here by its exponent as float32 stores it: int32, `biased`. Code and
remainder add up to acc, bit for bit; csrc/common/e3m0.h has the proof.
"""

import torch
from torch import Tensor

from ..layout import LEAST_SCALE, MOST_SCALE

MAGNITUDE = 0x7FFFFFFF  # a float32 but for its sign
HALF = 1 << 22  # of its mantissa: from 1.5 times a power of two the next one is nearest


def nearest_scale(x: Tensor) -> Tensor:
    """The biased exponents of the powers of two nearest to magnitudes, the larger one of two."""
    return _nearest_power(x).clamp(LEAST_SCALE, MOST_SCALE)


def holds(acc: Tensor, biased: Tensor) -> Tensor:
    """Whether an entry can be sent: half the scale or more, and below 2**24 x the largest code."""
    magnitude = acc.view(torch.int32) & MAGNITUDE
    half_the_scale = torch.where(biased == 1, HALF, (biased - 1) << 23)
    return (magnitude >= half_the_scale) & (magnitude < (biased + 31).clamp(max=255) << 23)


def encode(acc: Tensor, biased: Tensor) -> Tensor:
    """The nearest code, the larger one on a tie: negative << 3 | exponent, int32."""
    exponent = (_nearest_power(acc) - biased).clamp(0, 7)
    return (acc.view(torch.int32) < 0).to(torch.int32) << 3 | exponent


def decode(code: Tensor, biased: Tensor) -> Tensor:
    magnitude = ((biased + (code & 7)) << 23).view(torch.float32)
    return torch.where(code >= 8, -magnitude, magnitude)


def _nearest_power(x: Tensor) -> Tensor:
    # In int64: a NaN's bits would carry into the sign.
    magnitude = (x.view(torch.int32) & MAGNITUDE).to(torch.int64)
    return ((magnitude + HALF) >> 23).to(torch.int32)
