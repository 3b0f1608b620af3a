"""What a rank holds of a module that torch's fully_shard has cut.

DTensor and FSDP2 are imported by whoever cuts a module; here they would cost every user a second.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dct_kernels import checks

from ..exchange.parameters import unwrapped


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return isinstance(tensor, _imported("torch.distributed.tensor", "DTensor"))


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, any other tensor whole: the same memory, without grad."""
    own: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return own.detach()


def cut_of(tensor: Tensor) -> int:
    """The dimension that a DTensor on a mesh of one is cut along; 0 of any other tensor."""
    return int(tensor.placements[0].dim) if is_sharded(tensor) else 0  # type: ignore[attr-defined]


def reshard(module: nn.Module) -> None:
    """Have FSDP2 drop what it gathered, say in an evaluation: then parameters are the shards."""
    kind = _imported("torch.distributed.fsdp", "FSDPModule")
    for part in module.modules():
        if isinstance(part, kind):
            part.reshard()


def shard_groups(module: object) -> list[dist.ProcessGroup]:
    """This rank's shard group, if the module may have one: for ranks to be told of errors."""
    found = _sharded(module) if isinstance(module, nn.Module) else {}
    meshes = [parameter.device_mesh for parameter in found.values()]
    return [meshes[0].get_group()] if meshes and meshes[0].ndim == 1 else []


def require_mesh(op: str, module: nn.Module) -> DeviceMesh | None:
    """The mesh that all parameters are cut on; None if none is cut; raise if it is otherwise."""
    found = _sharded(module)
    if not found:
        return None
    rule = 'cut by fully_shard(module, mesh=mesh["shard"]), like every other'
    mesh: DeviceMesh = next(iter(found.values())).device_mesh
    for name, parameter in module.named_parameters():
        if is_sharded(parameter):
            (placement, *more), own = parameter.placements, parameter.device_mesh  # type: ignore
            shard = _imported("torch.distributed.tensor", "Shard")
            if more or own != mesh or type(placement) is not shard:
                got = f"{tuple(parameter.placements)} on {own}"  # type: ignore[attr-defined]
                checks.fail(op, f"parameter {unwrapped(name)}", rule, got)
        elif parameter.requires_grad:
            checks.fail(op, f"parameter {unwrapped(name)}", rule, "one that is not sharded")
    return mesh


def require_replicas(op: str, group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
    """Raise if ranks of this one's shard group are in `group`, which averages equal shards."""
    others = set(dist.get_process_group_ranks(mesh.get_group())) - {dist.get_rank()}
    shared = sorted(others & set(dist.get_process_group_ranks(group)))
    if shared:
        rule = 'the ranks with the same shard, such as mesh["replicate"].get_group()'
        got = f"a group with {', '.join(map(str, shared))}, of other shards of the same replica"
        checks.fail(op, "process_group", rule, got)


def _sharded(module: nn.Module) -> dict[str, Any]:
    """{name: parameter} of its DTensors."""
    reshard(module)
    return {name: p for name, p in module.named_parameters() if is_sharded(p)}


def _imported(module: str, name: str) -> Any:
    """A class, or () if nobody has imported its module: then nothing is an instance of it."""
    return getattr(sys.modules.get(module), name, ())
