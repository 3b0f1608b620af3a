"""Eager sample_threshold."""

import math

import torch
from torch import Tensor

from .. import layout
from .rounding import magnitude_key


def scaled(grad: Tensor, inv_scale: Tensor | None) -> Tensor:
    """grad * inv_scale in float32, rounded before it is added to the residual."""
    grad = grad.to(torch.float32)
    return grad if inv_scale is None else grad * inv_scale.reshape(())


def hash32(seed: int, range_index: int, index: torch.Tensor) -> torch.Tensor:
    """The hash that docs/reference/ops.md specifies: uint32 values in int64."""
    mask = 0xFFFFFFFF
    start = ((seed * 0x9E3779B1) ^ (range_index * 0x85EBCA77)) & mask
    x = ((index * 0xC2B2AE3D) & mask) ^ start
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & mask
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & mask
    return x ^ (x >> 16)


def stratified_picks(
    numel: int, picks: int, seed: int, range_index: int, device: torch.device
) -> torch.Tensor:
    """One hashed index in each of `picks` strata of [0, numel). Their sizes differ by at most 1."""
    j = torch.arange(picks + 1, dtype=torch.int64, device=device)
    # Equal to j * numel // picks, without 64-bit overflow.
    bounds = j * (numel // picks) + j * (numel % picks) // picks
    start, length = bounds[:-1], bounds[1:] - bounds[:-1]
    hashed = hash32(seed & 0xFFFFFFFF, range_index, j[:-1])
    # (hashed * length) >> 32, without overflow: the two halves of hashed are multiplied separately.
    return start + (((hashed >> 16) * length + (((hashed & 0xFFFF) * length) >> 16)) >> 16)


def sample_threshold(
    grad: Tensor,
    residual: Tensor,
    density: float,
    ranges: int = 1,
    max_samples: int = 65536,
    seed: int = 0,
    inv_scale: Tensor | None = None,
) -> Tensor:
    threshold = torch.full((ranges,), math.inf, dtype=torch.float32, device=grad.device)
    for r in range(ranges):
        low, high = layout.range_bounds(grad.numel(), ranges, r)
        if low == high:
            break  # the later ranges are also empty
        sampled: slice | Tensor = slice(low, high)
        if high - low > max_samples:
            sampled = low + stratified_picks(high - low, max_samples, seed, r, grad.device)
        keys = magnitude_key(residual[sampled] + scaled(grad[sampled], inv_scale))
        k = min(max(math.ceil(float(density) * keys.numel()), 1), keys.numel())
        threshold[r] = keys.topk(k).values[-1].view(torch.float32)
    return threshold
