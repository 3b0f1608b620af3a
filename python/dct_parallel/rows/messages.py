"""Packed rows as one message of two tensors."""

import torch
from torch import Tensor

from dct_kernels import checks


def require_rows(op: str, x: Tensor) -> Tensor:
    """`x` [B, d], made contiguous."""
    x = x.contiguous() if isinstance(x, Tensor) else x
    checks.require_tensor(op, "x", x, checks.FLOATS, (2,))
    return x


def to_message(values: Tensor, positions: Tensor) -> Tensor:
    """One uint8 [B, bytes] of values [B, k] and positions uint8 [B, w]: one collective, not two."""
    # Flat first: without rows an op may leave strides in which nothing can be viewed as bytes.
    nbytes = values.shape[1] * values.itemsize
    flat = values.flatten().view(torch.uint8)
    return torch.cat([flat.view(len(values), nbytes), positions], 1)


def from_message(message: Tensor, k: int, value_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values and positions that `to_message` made one."""
    at = k * value_dtype.itemsize
    # contiguous() would leave a single row as it is: not aligned for value_dtype.
    values = message[:, :at].clone(memory_format=torch.contiguous_format)
    return values.view(value_dtype), message[:, at:].contiguous()
