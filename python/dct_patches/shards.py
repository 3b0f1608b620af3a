"""The tensors by name, and the part of each tensor that this rank publishes."""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from dct_kernels import checks

from .part import Part

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def named(
    op: str, named_tensors: NamedTensors, rename: Callable[[str], str] = str
) -> dict[str, Tensor]:
    """The tensors by the names that `rename` returns. Raises an error for invalid arguments."""
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    rule = "a dict, or (name, tensor) pairs"
    if isinstance(pairs, Tensor) or not isinstance(pairs, Iterable):
        checks.fail(op, "named_tensors", rule, checks.shown(pairs), TypeError)
    found: dict[str, Tensor] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            checks.fail(op, "named_tensors", rule, checks.shown(pair), TypeError)
        name, tensor = rename(pair[0]), pair[1]
        if not isinstance(tensor, DTensor):
            checks.require_plain(op, f"named_tensors[{name!r}]", tensor)
        if name in found:
            rule = "different names, also after rename"
            checks.fail(op, "named_tensors", rule, f"{name!r} twice", verb="have")
        found[name] = tensor.detach()
    return found


def group_of(op: str, tensors: Mapping[str, Tensor]) -> dist.ProcessGroup | None:
    """The ranks that shard the tensors. None if there are no DTensors."""
    meshes = {tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)}
    if len(meshes) > 1 or any(mesh.ndim != 1 for mesh in meshes):
        rule = "DTensors on one mesh with one dimension"
        checks.fail(op, "named_tensors", rule, ", ".join(map(str, meshes)))
    return meshes.pop().get_group() if meshes else None


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device of the group's collectives."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def local_parts(
    op: str, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Part]:
    """The values that this rank publishes. `data` shares memory with the tensors if possible.

    The first rank publishes tensors that are not sharded.
    """
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    parts = {}
    for name, tensor in tensors.items():
        offset, local = 0, tensor
        if isinstance(tensor, DTensor):
            (placement,), local = tensor.placements, tensor.to_local()
            if type(placement) is Shard and placement.dim == 0:
                rows = min(rank * -(-len(tensor) // ranks), len(tensor))
                offset = rows * tensor.shape[1:].numel()
            elif not isinstance(placement, Replicate):
                rule = "sharded along its first dimension (Shard(0)) or replicated"
                checks.fail(op, f"named_tensors[{name!r}]", rule, placement)
        if rank == 0 or local.numel() < tensor.numel():
            data, shape = local.contiguous().view(-1).view(torch.uint8), tuple(tensor.shape)
            fields = name, shape, local.dtype, offset, local.numel()
            parts[name] = Part(*fields, whole=True, old=None, new=0, data=data)
    return parts
