"""The units in which torch's fully_shard communicates: modules with their own parameters."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import checks

from .._torch import (
    fsdp_divide_factor,
    fsdp_groups,
    fsdp_mesh_groups,
    fsdp_parameters,
    fsdp_reduced_dtype,
    fsdp_shard_group,
    fsdp_shard_numels,
)
from ..exchange.plan import unwrapped


class Piece(NamedTuple):
    """This rank's shard of a parameter, in the flat gradient of a unit.

    FSDP splits a gradient into shards of equal length along one dimension. The last shards are
    padded with zeros.

    Attributes:
        name: the name of the parameter in the model without wrappers.
        parameter: the sharded parameter.
        dim: the dimension along which the parameter is sharded.
        padded: the number of elements of a padded shard, which is the same on every rank.
    """

    name: str
    parameter: DTensor
    dim: int
    padded: int

    @property
    def local(self) -> torch.Size:
        """The shape of this rank's shard, without the padding."""
        return self.parameter.to_local().shape


class Unit:
    """A module that fully_shard was applied to, with its own parameters.

    FSDP2 gathers the shards of these parameters as one flat tensor, and reduces their gradients in
    the same order.

    Args:
        names: {parameter: its name} for the model.

    Attributes:
        name: the name of the module.
        module, group: the module and FSDP2's parameter group, for the functions of `_torch`.
        device: the device of the flat tensors. Offloaded parameters are on a different device.
    """

    def __init__(
        self, op: str, name: str, module: FSDPModule, group: Any, names: dict[nn.Parameter, str]
    ) -> None:
        self._op, self.name, self.module, self.group = op, name, module, group
        self.device: torch.device = group.device
        parameters = fsdp_parameters(group)
        if any(parameter not in names for parameter in parameters):
            rule = f"all parameters that were wrapped together with module {name}"
            checks.fail(op, "model", rule, "a part of them", verb="have")
        self._names = [names[parameter] for parameter in parameters]
        self._numels = fsdp_shard_numels(group)
        self._layout = tuple(zip(self._numels, (p.dim() < 2 for p in parameters), strict=True))

    def parameters(self) -> dict[nn.Parameter, str]:
        """The sharded parameters and their names, in the order of the flat tensors.

        Reads the parameters from the module, because the user may freeze or replace them.
        """
        return dict(zip(fsdp_parameters(self.group), self._names, strict=True))

    def layout(self, trained: bool = False) -> tuple[tuple[int, bool], ...]:
        """The layout of a rank's part of the flat tensor of weights (of gradients, if `trained`).

        Returns (number of elements of the padded shard, whether it is of a vector) per parameter.
        """
        if not trained:
            return self._layout
        parts = zip(self._layout, fsdp_parameters(self.group), strict=True)
        return tuple(part for part, parameter in parts if parameter.requires_grad)

    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that hold the shards of the module."""
        group = fsdp_shard_group(self.group)
        if group is None:
            got = f"module {self.name} that is replicated"
            checks.fail(self._op, "model", "sharded by fully_shard", got)
        return group

    def pieces(self, mesh: DeviceMesh) -> tuple[Piece, ...]:
        """This rank's shards of the parameters that require grad.

        Raises an error unless the shard dimension of `mesh` shards them.
        """
        parts = zip(self.parameters().items(), self._numels, strict=True)
        trained = [(name, p, numel) for (p, name), numel in parts if p.requires_grad]
        return tuple(_piece(self._op, mesh, *each) for each in trained)

    @property
    def reduction(self) -> str:
        """The reduction of gradients over the shards. By default "mean".

        With other reductions, FSDP may also divide the gradient after the all-reduce hook, by a
        number that depends on the number of shards.
        """
        dtype, factor = fsdp_reduced_dtype(self.group), fsdp_divide_factor(self.group)
        sums = self.group.force_sum_reduction_for_comms
        if factor is None and not sums and dtype != torch.float16:
            return "mean"
        shards = self.shard_group().size()
        return f"{'sum' if sums else 'mean'} of {shards} in {dtype}, divide factor {factor}"


def mesh_groups(model: object) -> list[dist.ProcessGroup]:
    """The groups along the meshes of all units, before any check. Empty if there are no units."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = [g for m in modules if isinstance(m, FSDPModule) for g in fsdp_groups(m)]
    return list(dict.fromkeys(group for g in found for group in fsdp_mesh_groups(g)))


def units_of(op: str, model: nn.Module) -> list[Unit]:
    """Return the units of a model in module order. `op` is the entry point, for error messages."""
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    modules = [(name or "(root)", m) for name, m in named if isinstance(m, FSDPModule)]
    if not modules:
        rule = "a module that fully_shard was applied to"
        if isinstance(model, DistributedDataParallel):
            rule += " (for a DDP module, register dct_hook with a DCTState)"
        checks.fail(op, "model", rule, checks.shown(model), TypeError)
    for _, module in modules:
        module.reshard()
    names = {parameter: unwrapped(name) for name, parameter in model.named_parameters()}
    units: dict[int, Unit] = {}  # {id of FSDP's group: unit}; modules may share a group
    for name, module in modules:
        groups = fsdp_groups(module)
        if len(groups) > 1:
            rule = f"one parameter group in module {name} (all parameters on one mesh)"
            checks.fail(op, "model", rule, len(groups), verb="have")
        for group in groups:
            if id(group) not in units:
                units[id(group)] = Unit(op, name, module, group, names)
    return list(units.values())


def _piece(op: str, mesh: DeviceMesh, name: str, parameter: nn.Parameter, padded: int) -> Piece:
    arg = f"parameter {name}"
    checks.require_dtype(op, arg, parameter.dtype, checks.FLOATS)
    if parameter.is_meta:
        checks.fail(op, arg, "on a device (materialize the model before the hook)", "one on meta")
    if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh["shard"]:
        got = "one that is not sharded"
        if isinstance(parameter, DTensor):
            got = f"one on {parameter.device_mesh}"
        rule = 'wrapped by fully_shard(module, mesh=mesh["shard"]), which leaves the mean over '
        checks.fail(op, arg, f"{rule}replicas to the hook", got)
    placement = parameter.placements[0]
    if type(placement) is not Shard:
        checks.fail(op, arg, "sharded in one dimension", parameter.placements)
    return Piece(name, parameter, placement.dim, padded)
