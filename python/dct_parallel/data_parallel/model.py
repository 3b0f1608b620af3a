"""The parameters that a DDP averages: their names, and whether they can be compressed."""

import gc
import hashlib
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import checks

_AnyTensor = TypeVar("_AnyTensor", bound=Tensor)

# Parts of a name that come and go with a wrapper: of torch.compile, and of checkpoint_wrapper.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def named_parameters(ddp: DistributedDataParallel) -> dict[Parameter, str]:
    """{parameter: name} of what DDP averages, named as in the model that nothing wraps.

    Raises:
        TypeError, ValueError: not a DDP, or a parameter that cannot be compressed, by name.
    """
    if not isinstance(ddp, DistributedDataParallel):
        got = type(ddp).__name__
        checks.fail("DCTState", "ddp", "a DistributedDataParallel", got, TypeError)
    names = {}
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and name not in ddp.parameters_to_ignore:
            name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
            checks.require_dtype("DCTState", f"parameter {name}", parameter.dtype, checks.FLOATS)
            names[parameter] = name
    device = device_of(names)
    if device.type not in ("cpu", "cuda"):
        checks.fail("DCTState", "ddp", "on the CPU or on CUDA", device)
    return names


def device_of(names: dict[Parameter, str]) -> torch.device:
    """Where the parameters are; DDP has at least one."""
    return next(iter(names)).device


def describe(names: Mapping[_AnyTensor, str]) -> str:
    """In one line what must be the same on every rank: names, sizes and dtypes, in order."""
    lines = [f"{name} {p.dtype} {tuple(p.shape)}\n" for p, name in names.items()]
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()[:12]
    numel = sum(parameter.numel() for parameter in names)
    return f"{len(names)} parameters of {numel:,} elements, names and shapes {digest}"


def holds_ddp(module: nn.Module) -> bool:
    """Whether it is a DDP, or has one in it."""
    return any(isinstance(part, DistributedDataParallel) for part in module.modules())


def has_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a hook is registered, as far as DDP notes that."""
    return bool(getattr(ddp, "_comm_hooks", True))


def ddp_of(parameter: Tensor) -> DistributedDataParallel:
    """The DDP that averages this parameter: torch does not tell a hook which one calls it."""
    found: list[DistributedDataParallel] = [
        ddp
        for ddp in gc.get_objects()
        if issubclass(type(ddp), DistributedDataParallel)
        and any(own is parameter for own in ddp.module.parameters())
    ]
    if len(found) != 1:
        rule = "bound to its DDP before training, by state.bind(ddp)"
        checks.fail("dct_hook", "state", rule, f"{len(found)} that hold its parameters")
    return found[0]
