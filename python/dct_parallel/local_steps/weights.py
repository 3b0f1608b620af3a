"""The weights of a module as one flat tensor, for averaging."""

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
from ..groups import bit_sums
from ..load_hooks import LoadWatcher


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor."""
    return isinstance(tensor, _imported("torch.distributed.tensor", "DTensor"))


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, or any other tensor, detached and in the same memory."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part.detach()


def shard_dim(tensor: Tensor) -> int:
    """The dimension along which a DTensor on a one-dimensional mesh is sharded, or 0."""
    return int(tensor.placements[0].dim) if is_sharded(tensor) else 0  # type: ignore[attr-defined]


def reshard(module: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered, so that parameters are the shards again."""
    for part in module.modules():
        if isinstance(part, _imported("torch.distributed.fsdp", "FSDPModule")):
            part.reshard()


def shard_groups(module: object) -> list[dist.ProcessGroup]:
    """A list with this rank's shard group, or an empty list without a one-dimensional mesh."""
    found = _sharded(module) if isinstance(module, nn.Module) else {}
    meshes = [parameter.device_mesh for parameter in found.values()]
    return [meshes[0].get_group()] if meshes and meshes[0].ndim == 1 else []


def require_mesh(op: str, module: nn.Module) -> DeviceMesh | None:
    """Return the mesh on which all parameters are sharded, or None if no parameter is sharded.

    Raises an error if sharded parameters have different meshes or several placements, or if a
    parameter that requires grad is not sharded.
    """
    found = _sharded(module)
    if not found:
        return None
    rule = 'sharded by fully_shard(module, mesh=mesh["shard"]), like every other'
    mesh: DeviceMesh = next(iter(found.values())).device_mesh
    for name, parameter in module.named_parameters():
        if is_sharded(parameter):
            (placement, *more), other = parameter.placements, parameter.device_mesh  # type: ignore
            shard = _imported("torch.distributed.tensor", "Shard")
            if more or other != mesh or type(placement) is not shard:
                got = f"{parameter.placements} on {other}"  # type: ignore[attr-defined]
                checks.fail(op, f"parameter {unwrapped(name)}", rule, got)
        elif parameter.requires_grad:
            checks.fail(op, f"parameter {unwrapped(name)}", rule, "one that is not sharded")
    return mesh


def require_replicas(op: str, group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
    """Raise if `group` contains ranks that hold other shards of the same replica."""
    others = set(dist.get_process_group_ranks(mesh.get_group())) - {dist.get_rank()}
    shared = sorted(others & set(dist.get_process_group_ranks(group)))
    if shared:
        rule = 'the ranks with the same shard, such as mesh["replicate"].get_group()'
        ranks = " and rank ".join(map(str, shared))
        got = f"a group that contains other shards of this replica, on rank {ranks}"
        checks.fail(op, "process_group", rule, got)


def _sharded(module: nn.Module) -> dict[str, Any]:
    """{name: parameter} for the parameters that are DTensors."""
    reshard(module)
    return {name: p for name, p in module.named_parameters() if is_sharded(p)}


def _imported(module: str, name: str) -> Any:
    """A class for isinstance() if its module was imported, else (), which matches nothing."""
    return getattr(sys.modules.get(module), name, ())


class FlatWeights(LoadWatcher):
    """The parameters of a module that require grad, concatenated in float32.

    For a module that fully_shard has sharded, the tensor contains this rank's shards.

    Args:
        op: the entry point, for error messages.
        module: has float32, bfloat16 or float16 parameters on one CPU or CUDA device. Contains no
            DDP module.
        group: the ranks that average the parameters.

    Attributes:
        names: {parameter: name} for the parameters that require grad.
        frozen: {parameter: name} for all other parameters.
        shard: the number of this rank's shard and the number of shards, as text.
        shard_groups: the process group that shards the parameters, if any.
        sizes: the number of elements of each parameter on this rank.
        device: the device of all parameters.
    """

    def __init__(self, op: str, module: nn.Module, group: dist.ProcessGroup) -> None:
        checks.require_type(op, "module", module, nn.Module, "an nn.Module")
        if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
            rule = "trained without DistributedDataParallel, which averages all gradients (do not "
            rule += "wrap it: train the module itself; if a framework wraps it, train under "
            rule += "ddp.no_sync() and pass ddp.module)"
            checks.fail(op, "module", rule, type(module).__name__, TypeError)
        self._module = module
        self.shard, self.shard_groups = WHOLE, shard_groups(module)
        mesh = require_mesh(op, module)
        if mesh is not None:
            require_replicas(op, group, mesh)
            self.shard = f"{mesh.get_local_rank()} of {mesh.size()}"
            dims = [shard_dim(parameter) for parameter in module.parameters()]
            if any(dims):  # equal sizes do not imply equal shards
                self.shard += f", cut along {', '.join(map(str, dims))}"
        self.names, self.frozen = self._named(trained=True), self._named(trained=False)
        if not self.names:
            checks.fail(op, "module", "parameters that require grad", "none", verb="have")
        for parameter, name in self.names.items():
            checks.require_dtype(op, f"parameter {name}", parameter.dtype, checks.FLOATS)
        devices = {local(parameter).device for parameter in self.names | self.frozen}
        self.device = next(iter(devices))
        if len(devices) > 1 or self.device.type not in ("cpu", "cuda"):
            got = ", ".join(sorted(map(str, devices)))
            checks.fail(op, "module", "on one device, the CPU or CUDA", got)
        self.sizes = tuple(local(parameter).numel() for parameter in self.names)
        # Values before the first load and after the last one since `take_loaded`.
        self._before: dict[Parameter, Tensor] = {}
        self._loaded: dict[Parameter, Tensor] = {}
        self.watch_loads(module)

    @property
    def numel(self) -> int:
        """The average number of elements per shard, rounded up. It is the same on every rank."""
        ranks = self.shard_groups[0].size() if self.shard_groups else 1
        return -(-sum(parameter.numel() for parameter in self.names) // ranks)

    def to_compare(self) -> dict[str, str]:
        """Strings that must be the same on every rank."""
        model = {p: f"{n} {getattr(p, 'placements', '')}" for p, n in self.names.items()}
        return {"model": describe(model), "frozen": describe(self.frozen)}

    def require_same(self, op: str) -> None:
        """Raise if the set of parameters that require grad has changed since construction."""
        now = self._named(trained=True)
        names = now | self.names
        different = [names[parameter] for parameter in now.keys() ^ self.names.keys()]
        if different:
            rule = "the same parameters that require grad as when this averager was made"
            got = f"a difference in {', '.join(sorted(set(different)))}: make a new averager"
            checks.fail(op, "module", rule, got, verb="have")

    @torch.no_grad()
    def broadcast_from_first_rank(self, group: dist.ProcessGroup) -> None:
        """Broadcast all parameters of the first rank, including frozen ones, to other ranks."""
        first = dist.get_global_rank(group, 0)
        for tensor in map(local, self._module.parameters()):
            flat = tensor.flatten().contiguous()  # a view if the tensor is contiguous
            dist.broadcast(flat.view(torch.uint8), first, group)  # bytes, for any dtype
            tensor.copy_(flat.view_as(tensor))

    def read(self) -> Tensor:
        """Return a copy of the weights."""
        return torch.cat([tensor.flatten().float() for tensor in self._tensors()])

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Copy `flat` into the parameters, rounded to their dtypes."""
        reshard(self._module)  # gathered copies would keep the old values
        for tensor, part in zip(self._tensors(), flat.split(self.sizes), strict=True):
            tensor.copy_(part.view_as(tensor))

    def before_load(self, parameter: Parameter) -> None:
        if parameter in self.names and parameter not in self._loaded:
            self._before[parameter] = local(parameter).clone()

    def after_load(self, parameter: Parameter) -> None:
        if parameter not in self._before:
            return
        now, loaded = local(parameter).clone(), self._loaded.pop(parameter, None)
        # A load replaces a tied parameter under each of its names.
        is_first = loaded is None or torch.equal(now, loaded)
        if is_first or not torch.equal(now, self._before[parameter]):
            self._loaded[parameter] = now

    def take_loaded(self) -> dict[Parameter, Tensor]:
        """Return {parameter: this rank's loaded values} since the last call of this method.

        If a later load restores the values from before the first load, it cancels the first load. A
        user may load other weights for an evaluation, and then load the training's weights again.
        """
        loaded, self._loaded, self._before = self._loaded, {}, {}
        return loaded

    def change_from(self, base: Tensor) -> Tensor:
        """Return the weights minus `base`, after `base` is rounded to the dtypes of the weights.

        Without this rounding, the rounding error of the base would be part of the change.
        """
        moved = torch.empty_like(base)
        parts = zip(self._tensors(), moved.split(self.sizes), base.split(self.sizes), strict=True)
        for tensor, out, start in parts:
            whole = tensor.float()
            torch.sub(whole, start.to(tensor.dtype).view_as(whole), out=out.view_as(whole))
        return moved

    def gradient_digest(self) -> int:
        """The sum of the bits of this rank's gradients as integers, or 0 without gradients."""
        grads = [local(p.grad) for p in self.names if p.grad is not None and not p.grad.is_sparse]
        return sum(bit_sums(grads))

    def is_representable(self, flat: Tensor) -> Tensor:
        """For each element of `flat`, whether it is finite in the dtype of its parameter."""
        parts = zip(self._tensors(), flat.split(self.sizes), strict=True)
        return torch.cat([part.to(tensor.dtype).isfinite() for tensor, part in parts])

    def all_representable(self, flat: Tensor) -> bool:
        """Whether every element is representable. Checks the minimum and maximum per dtype."""
        ends = []
        for dtype, run in itertools.groupby(self._tensors(), key=lambda tensor: tensor.dtype):
            part, flat = flat.tensor_split([sum(tensor.numel() for tensor in run)])
            if part.numel() > 0:
                ends.append(torch.stack(part.aminmax()).to(dtype).isfinite())
        return not ends or bool(torch.cat(ends).all())  # one host sync for all dtypes

    def cause(self, base: Tensor) -> str:
        """Describe which weights, or which entries of the next `base`, are not finite."""
        names = self._names_of(~self.read().isfinite())
        if names:
            return f"NaN or Inf in {names}"
        names = self._names_of(~self.is_representable(base)) or "another shard"
        return f"NaN or Inf on another rank, or changes that overflow, in {names}"

    def _names_of(self, where: Tensor) -> str:
        parts = zip(self.names.values(), where.split(self.sizes), strict=True)
        return ", ".join(name for name, part in parts if part.any())

    def _tensors(self) -> list[Tensor]:
        return [local(parameter) for parameter in self.names]

    def _named(self, trained: bool) -> dict[Parameter, str]:
        reshard(self._module)
        named = self._module.named_parameters()
        return {p: unwrapped(name) for name, p in named if p.requires_grad == trained}
