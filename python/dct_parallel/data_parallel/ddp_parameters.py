"""The parameters that a DDP averages: their names, and whether they can be compressed."""

import torch
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import checks

from ..exchange.parameters import unwrapped


def named_parameters(ddp: DistributedDataParallel) -> dict[Parameter, str]:
    """{parameter: name} of the parameters that DDP averages, named as in the unwrapped model.

    Raises:
        TypeError, ValueError: not a DDP, or a parameter that cannot be compressed, by name.
    """
    if not isinstance(ddp, DistributedDataParallel):
        got = type(ddp).__name__
        checks.fail("DCTState", "ddp", "a DistributedDataParallel", got, TypeError)
    names = {}
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and name not in ddp.parameters_to_ignore:
            name = unwrapped(name)
            checks.require_dtype("DCTState", f"parameter {name}", parameter.dtype, checks.FLOATS)
            names[parameter] = name
    device = device_of(names)
    if device.type not in ("cpu", "cuda"):
        checks.fail("DCTState", "ddp", "on the CPU or on CUDA", device)
    return names


def device_of(names: dict[Parameter, str]) -> torch.device:
    """The device of the parameters; DDP has at least one."""
    return next(iter(names)).device


def has_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a hook is registered, as far as DDP notes that; not with a copy, which only has the
    note."""
    hooks = getattr(ddp, "_comm_hooks", [(None, None)])
    return any(not getattr(state, "copied", False) for _, state in hooks)
