"""Residuals of parameters whose memory is not in the order of their indices, as of channels_last.

DDP's buckets hold dense parameters in the order of their memory, and so do buckets' residuals. A
checkpoint is in the order of indices, whatever the format.
"""

import torch
from torch import Tensor


def to_logical(flat: Tensor, parameter: Tensor) -> Tensor:
    """`flat` [numel], as a bucket has it, in the order of the parameter's indices."""
    if not _differs(parameter):
        return flat
    return flat.as_strided(parameter.shape, parameter.stride()).flatten()


def to_physical(flat: Tensor, parameter: Tensor) -> Tensor:
    """The reverse of `to_logical`."""
    if not _differs(parameter):
        return flat
    moved = torch.empty_like(flat)
    moved.as_strided(parameter.shape, parameter.stride()).copy_(flat.view(parameter.shape))
    return moved


def _differs(parameter: Tensor) -> bool:
    """Whether DDP keeps an order that is not that of the indices: only of dense memory."""
    if parameter.is_contiguous():
        return False
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()
