"""The parameters that a DDP averages, and the order of their elements.

DDP's buckets hold dense parameters in the order of their memory, which differs from the order of
their indices for, say, channels_last. Residuals have the order of the bucket; checkpoints have the
order of the indices.
"""

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import checks

from ..exchange.plan import unwrapped


def named_parameters(ddp: DistributedDataParallel) -> dict[Parameter, str]:
    """{parameter: name} of the parameters that DDP averages, named as in the unwrapped model.

    Raises:
        TypeError, ValueError: not a DDP, or a parameter that cannot be compressed, by name.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"dct::DCTState: ddp must be a DistributedDataParallel, got {type(ddp).__name__}"
        )
    names = {}
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and name not in ddp.parameters_to_ignore:
            name = unwrapped(name)
            checks.require_dtype("DCTState", f"parameter {name}", parameter.dtype, checks.FLOATS)
            names[parameter] = name
    device = device_of(names)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"dct::DCTState: ddp must be on the CPU or on CUDA, got {device}")
    return names


def device_of(names: dict[Parameter, str]) -> torch.device:
    """The device of the parameters; DDP has at least one."""
    return next(iter(names)).device


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
    """Whether DDP keeps the elements in a different order than that of the indices."""
    if parameter.is_contiguous():
        return False
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()
