"""The weights of a module as one flat tensor, which ranks average."""

import itertools
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import checks

from ..exchange.checkpoint import WHOLE
from ..exchange.plan import describe, unwrapped

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element


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
    """Have FSDP2 drop what it gathered, say in an evaluation: then parameters are the"""
    kind = _imported("torch.distributed.fsdp", "FSDPModule")
    for part in module.modules():
        if isinstance(part, kind):
            part.reshard()


def shard_groups(module: object) -> list[dist.ProcessGroup]:
    """This rank's shard group, if the module may have one; its ranks are notified of errors."""
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
                got = f"{parameter.placements} on {own}"  # type: ignore[attr-defined]
                raise ValueError(
                    f"dct::{op}: parameter {unwrapped(name)} must be {rule}, got {got}"
                )
        elif parameter.requires_grad:
            raise ValueError(
                f"dct::{op}: parameter {unwrapped(name)} must be {rule}, got one that is not "
                "sharded"
            )
    return mesh


def require_replicas(op: str, group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
    """Raise if ranks of this one's shard group are in `group`, which averages equal"""
    others = set(dist.get_process_group_ranks(mesh.get_group())) - {dist.get_rank()}
    shared = sorted(others & set(dist.get_process_group_ranks(group)))
    if shared:
        raise ValueError(
            f"dct::{op}: process_group must be the ranks with the same shard, such as "
            f'mesh["replicate"].get_group(), got a group with {", ".join(map(str, shared))}, of '
            "other shards of the same replica"
        )


def _sharded(module: nn.Module) -> dict[str, Any]:
    """{name: parameter} of its DTensors."""
    reshard(module)
    return {name: p for name, p in module.named_parameters() if is_sharded(p)}


def _imported(module: str, name: str) -> Any:
    """A class, or () if nobody has imported its module: then nothing is an instance of it."""
    return getattr(sys.modules.get(module), name, ())


class FlatWeights:
    """The parameters of a module that require grad, one after another, in float32.

    Of a module that fully_shard has cut, this rank's

    Args:
        op: their owner, for errors.
        module: float32, bfloat16 or float16 parameters, on one CPU or CUDA device; no DDP.
        group: the ranks that average them.

    Attributes:
        names: {parameter: name} of those that require grad.
        frozen: {parameter: name} of the others.
        shard: which one they are of how many, in words.
        shard_group: the ranks with the others, or None.
        sizes: elements of each, on this rank.
        device: of all.

    Raises:
        ValueError, TypeError: the module is not like this.
    """

    def __init__(self, op: str, module: nn.Module, group: dist.ProcessGroup) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"dct::{op}: module must be an nn.Module, got {checks.shown(module)}")
        if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
            raise TypeError(
                f"dct::{op}: module must be trained without DistributedDataParallel, which "
                "averages all gradients (do not wrap it: train the module itself; if a framework "
                "wraps it, train under ddp.no_sync() and pass ddp.module), got "
                f"{type(module).__name__}"
            )
        self._module = module
        self.shard, self.shard_group = WHOLE, None
        mesh = require_mesh(op, module)
        if mesh is not None:
            require_replicas(op, group, mesh)
            self.shard = f"{mesh.get_local_rank()} of {mesh.size()}"
            self.shard_group = mesh.get_group()
            cuts = [cut_of(parameter) for parameter in module.parameters()]
            if any(cuts):  # not the first dimension of all, where parts of one size may differ
                self.shard += f", cut along {', '.join(map(str, cuts))}"
        self.names, self.frozen = self._named(trained=True), self._named(trained=False)
        if not self.names:
            raise ValueError(f"dct::{op}: module must have parameters that require grad, got none")
        for parameter, name in self.names.items():
            checks.require_dtype(op, f"parameter {name}", parameter.dtype, checks.FLOATS)
        devices = {local(parameter).device for parameter in self.names | self.frozen}
        self.device = next(iter(devices))
        if len(devices) > 1 or self.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"dct::{op}: module must be on one device, the CPU or CUDA, got "
                f"{', '.join(sorted(map(str, devices)))}"
            )
        self.sizes = tuple(local(parameter).numel() for parameter in self.names)

    @property
    def numel(self) -> int:
        """Elements of an average shard: the same on every rank, unlike the sum of sizes."""
        ranks = 1 if self.shard_group is None else self.shard_group.size()
        return -(-sum(parameter.numel() for parameter in self.names) // ranks)

    def to_compare(self) -> dict[str, str]:
        """Texts that must be the same on every rank."""
        cut = {p: f"{n} {getattr(p, 'placements', '')}" for p, n in self.names.items()}
        return {"model": describe(cut), "frozen": describe(self.frozen)}

    def require_same(self, op: str) -> None:
        """Raise if different parameters require grad than at the start: each rank would train its
        own."""
        now = self._named(trained=True)
        names = now | self.names
        different = [names[parameter] for parameter in now.keys() ^ self.names.keys()]
        if different:
            raise ValueError(
                f"dct::{op}: module must have the same parameters that require grad as when this "
                f"averager was made, got a difference in {', '.join(sorted(set(different)))}: "
                "make a new averager"
            )

    @torch.no_grad()
    def broadcast_from_first_rank(self, group: dist.ProcessGroup) -> None:
        """Broadcast all parameters of the first rank, frozen ones as well, to the others."""
        first = dist.get_global_rank(group, 0)
        for own in map(local, self._module.parameters()):
            flat = own.flatten().contiguous()  # its memory, if that is
            dist.broadcast(flat.view(torch.uint8), first, group)  # of any dtype
            own.copy_(flat.view_as(own))

    def read(self) -> Tensor:
        """A copy."""
        return torch.cat([own.flatten().float() for own in self._own()])

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Copy them into the parameters, rounded to each one's dtype."""
        reshard(self._module)  # what was gathered would not change with them
        for own, part in zip(self._own(), flat.split(self.sizes), strict=True):
            own.copy_(part.view_as(own))

    def change_from(self, base: Tensor) -> Tensor:
        """The difference between the weights and `base` rounded to their dtype.

        The rounding error of the base stays in the base.
        """
        moved = torch.empty_like(base)
        parts = zip(self._own(), moved.split(self.sizes), base.split(self.sizes), strict=True)
        for own, part, of_base in parts:
            whole = own.float()
            torch.sub(whole, of_base.to(own.dtype).view_as(whole), out=part.view_as(whole))
        return moved

    def gradient_digest(self) -> int:
        """The sum of the bits of this rank's gradients, as integers; 0 without any."""
        grads = [local(p.grad) for p in self.names if p.grad is not None and not p.grad.is_sparse]
        bits = [grad.view(_INTEGERS[grad.itemsize]).sum(dtype=torch.int64) for grad in grads]
        return int(torch.stack(bits).sum()) if bits else 0

    def is_representable(self, flat: Tensor) -> Tensor:
        """For each element of `flat`, whether it is finite in the dtype of its parameter."""
        parts = zip(self._own(), flat.split(self.sizes), strict=True)
        return torch.cat([part.to(own.dtype).isfinite() for own, part in parts])

    def all_representable(self, flat: Tensor) -> bool:
        """Whether every element is. Only the smallest and the largest are read: NaN is both."""
        ends = []
        for dtype, run in itertools.groupby(self._own(), key=lambda own: own.dtype):
            part, flat = flat.tensor_split([sum(own.numel() for own in run)])
            if part.numel() > 0:
                ends.append(torch.stack(part.aminmax()).to(dtype).isfinite())
        return not ends or bool(torch.cat(ends).all())  # one host sync for all dtypes

    def cause(self, base: Tensor) -> str:
        """Which of them, or else of the next `base`, are not finite: for errors."""
        here = self._names_of(~self.read().isfinite())
        if here:
            return f"NaN or Inf in {here}"
        there = self._names_of(~self.is_representable(base)) or "another shard"
        return f"NaN or Inf on another rank, or changes that overflow, in {there}"

    def _names_of(self, where: Tensor) -> str:
        parts = zip(self.names.values(), where.split(self.sizes), strict=True)
        return ", ".join(name for name, part in parts if part.any())

    def _own(self) -> list[Tensor]:
        return [local(parameter) for parameter in self.names]

    def _named(self, trained: bool) -> dict[Parameter, str]:
        reshard(self._module)
        named = self._module.named_parameters()
        return {p: unwrapped(name) for name, p in named if p.requires_grad == trained}
