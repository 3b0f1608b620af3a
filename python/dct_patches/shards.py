"""The part of each named tensor that this rank publishes."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.distributed.tensor.placement_types import Shard as ShardPlacement

from dct_kernels import checks

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class Shard(NamedTuple):
    """A range of the elements of a tensor.

    Attributes:
        shape: of the whole tensor.
        offset: of the range, in elements.
        local: the range, contiguous [numel]. It shares memory with the tensor if possible.
    """

    shape: tuple[int, ...]
    offset: int
    local: Tensor


def named(op: str, named_tensors: NamedTensors) -> dict[str, Tensor]:
    """The tensors by name. Raises an error for wrong types and repeated names."""
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    if isinstance(pairs, Tensor) or not isinstance(pairs, Iterable):
        got = checks.shown(pairs)
        checks.fail(op, "named_tensors", "a dict, or (name, tensor) pairs", got, TypeError)
    found: dict[str, Tensor] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            checks.fail(op, "named_tensors", "(name, tensor) pairs", checks.shown(pair), TypeError)
        name, tensor = pair
        if not isinstance(tensor, DTensor):
            checks.require_plain(op, f"named_tensors[{name!r}]", tensor)
        if name in found:
            checks.fail(op, "named_tensors", "different names", f"{name!r} twice", verb="have")
        found[name] = tensor.detach()
    return found


def group_of(op: str, tensors: Mapping[str, Tensor]) -> dist.ProcessGroup | None:
    """The ranks that shard the tensors. None if there are no DTensors."""
    meshes = {tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)}
    if len(meshes) > 1 or any(mesh.ndim != 1 for mesh in meshes):
        rule = "DTensors on one mesh with one dimension"
        checks.fail(op, "named_tensors", rule, ", ".join(map(str, meshes)))
    return meshes.pop().get_group() if meshes else None


def local_shards(
    op: str,
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    rename: Callable[[str], str] | None,
) -> dict[str, Shard]:
    """The shards that this rank publishes, by the name that `rename` returns.

    The first rank publishes tensors that are not sharded.
    """
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    shards: dict[str, Shard] = {}
    names: dict[str, str] = {}
    for name, tensor in tensors.items():
        renamed = name if rename is None else rename(name)
        if renamed in names:
            got = f"{renamed!r} for {names[renamed]!r} and {name!r}"
            checks.fail(op, "rename", "different names", got, verb="return")
        names[renamed] = name
        offset, local = 0, tensor
        if isinstance(tensor, DTensor):
            offset, local = _local(op, name, tensor, rank, ranks)
        if rank == 0 or local.numel() < tensor.numel():
            shards[renamed] = Shard(tuple(tensor.shape), offset, local.contiguous().view(-1))
    return shards


def _local(op: str, name: str, tensor: DTensor, rank: int, ranks: int) -> tuple[int, Tensor]:
    """(offset of the local tensor in the whole tensor, in elements; the local tensor)."""
    (placement,), local = tensor.placements, tensor.to_local()
    if isinstance(placement, Replicate):
        return 0, local
    if type(placement) is not ShardPlacement or placement.dim != 0:
        rule = "sharded along its first dimension (Shard(0)) or replicated"
        checks.fail(op, f"named_tensors[{name!r}]", rule, placement)
    rows, width = tensor.shape[0], tensor.shape[1:].numel()
    first = min(rank * (-(-rows // ranks)), rows)
    return first * width, local


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in `dtype`. A NaN becomes the positive quiet NaN, as in `diff_pack`."""
    if values.dtype == dtype:
        return values
    return values.to(dtype).masked_fill_(values.isnan(), float("nan"))
