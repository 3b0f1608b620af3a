"""Eager sample_threshold."""

import itertools
import math

import torch
from torch import Tensor

from .rounding import magnitude_key


def scaled(grad: Tensor, inv_scale: Tensor | None) -> Tensor:
    """grad * inv_scale in float32, rounded before anything is added to it."""
    grad = grad.to(torch.float32)
    return grad if inv_scale is None else grad * inv_scale.reshape(())


def hash32(seed: int, segment: int, index: torch.Tensor) -> torch.Tensor:
    """The published hash, a uint32 in int64."""
    mask = 0xFFFFFFFF
    start = ((seed * 0x9E3779B1) ^ (segment * 0x85EBCA77)) & mask
    x = ((index * 0xC2B2AE3D) & mask) ^ start
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & mask
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & mask
    return x ^ (x >> 16)


def stratified_picks(
    numel: int, picks: int, seed: int, segment: int, device: torch.device
) -> torch.Tensor:
    """One hashed index in each of `picks` strata [j*n/m, (j+1)*n/m) of [0, numel)."""
    j = torch.arange(picks + 1, dtype=torch.int64, device=device)
    # Equal to j * numel // picks without its 64-bit overflow.
    bounds = j * (numel // picks) + j * (numel % picks) // picks
    start, length = bounds[:-1], bounds[1:] - bounds[:-1]
    hashed = hash32(seed & 0xFFFFFFFF, segment, j[:-1])
    # (hashed * length) >> 32, likewise: the two halves of hashed are multiplied apart.
    return start + (((hashed >> 16) * length + (((hashed & 0xFFFF) * length) >> 16)) >> 16)


def sample_threshold(
    x: Tensor,
    residual: Tensor | None,
    segments: Tensor,
    density: float,
    max_samples: int = 65536,
    seed: int = 0,
    inv_scale: Tensor | None = None,
) -> Tensor:
    bounds = segments.tolist()
    threshold = torch.full((len(bounds) - 1,), math.inf, dtype=torch.float32, device=x.device)
    for s, (low, high) in enumerate(itertools.pairwise(bounds)):
        if low == high:
            continue
        sampled: slice | Tensor = slice(low, high)
        if high - low > max_samples:
            sampled = low + stratified_picks(high - low, max_samples, seed, s, x.device)
        acc = scaled(x[sampled], inv_scale)
        if residual is not None:
            acc = residual[sampled] + acc
        keys = magnitude_key(acc)
        k = min(max(math.ceil(float(density) * keys.numel()), 1), keys.numel())
        threshold[s] = keys.topk(k).values[-1].view(torch.float32)
    return threshold
