"""The parameters that DDP averages, and the order of their elements.

DDP's buckets hold dense parameters in memory order, which differs from index order for formats such
as channels_last. Residuals are in memory order, like the bucket. Checkpoints are in index order.
"""

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import checks

from .._torch import expects_sparse_gradients, reduced_parameters
from ..exchange.plan import unwrapped


def named_parameters(ddp: DistributedDataParallel) -> dict[Parameter, str]:
    """Return {parameter: name} of the parameters that DDP averages, named as in the inner module.

    Raises:
        TypeError, ValueError: `ddp` is not a DDP module, or a parameter cannot be compressed.
    """
    if not isinstance(ddp, DistributedDataParallel):
        rule = "a DistributedDataParallel"
        if hasattr(ddp, "reshard"):  # an FSDPModule; importing that class takes a second
            rule += " (for a model that fully_shard was applied to, use dct_fully_shard_hook)"
        elif isinstance(ddp, nn.Module):
            rule += " (wrap the module in one first)"
        checks.fail("DCTState", "ddp", rule, checks.shown(ddp), TypeError)
    if expects_sparse_gradients(ddp):
        rule = "dense (build embeddings with sparse=False)"
        checks.fail("DCTState", "gradients of ddp", rule, "sparse ones")
    reduced = reduced_parameters(ddp)  # not by name: DDP may ignore one name of a tied weight
    named = ddp.module.named_parameters()
    names = {parameter: unwrapped(name) for name, parameter in named if parameter in reduced}
    for parameter, name in names.items():
        checks.require_dtype("DCTState", f"parameter {name}", parameter.dtype, checks.FLOATS)
    device = device_of(names)
    if device.type not in ("cpu", "cuda"):
        checks.fail("DCTState", "ddp", "on the CPU or on CUDA", device)
    return names


def device_of(names: dict[Parameter, str]) -> torch.device:
    """The device of the parameters. A DDP module has at least one parameter."""
    return next(iter(names)).device


def to_logical(flat: Tensor, parameter: Tensor) -> Tensor:
    """Reorder `flat` [numel] from the order in a bucket to the parameter's index order."""
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
    """Whether DDP stores the elements in an order other than index order."""
    if parameter.is_contiguous():
        return False
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()
