"""Exact top-k with error feedback, what DCT's threshold stands in for: the peer of every bench."""

import torch
from torch import Tensor


def take_largest(residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Move the k entries of largest magnitude out of the residual: (values, indices)."""
    return take(residual, torch.topk(residual.abs(), k, sorted=False).indices)


def take(residual: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Move these entries out of the residual: (values, indices)."""
    values = residual[index]
    residual[index] = 0
    return values, index
