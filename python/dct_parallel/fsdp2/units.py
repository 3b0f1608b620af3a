"""The units in which torch's fully_shard communicates, and the layout of their gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from dct_kernels import checks

from .._torch import fsdp_groups, fsdp_hook, fsdp_in_backward, fsdp_parameters
from ..exchange.plan import unwrapped
from .hook import OP


@dataclasses.dataclass(frozen=True)
class Piece:
    """This rank's shard of a parameter, in the flat gradient of a unit.

    FSDP splits a gradient into shards of equal length along one dimension. The last shards are
    padded with zeros.

    Attributes:
        name: the name of the parameter in the model without wrappers.
        parameter: the sharded parameter.
        dim: the dimension along which the parameter is sharded.
    """

    name: str
    parameter: DTensor
    dim: int

    @property
    def padded(self) -> int:
        """The number of elements of a padded shard, which is the same on every rank."""
        shape, ranks = self.parameter.shape, self.parameter.device_mesh.size()
        rows = shape[self.dim]
        return -(-rows // ranks) * (shape.numel() // max(rows, 1))

    @property
    def local(self) -> torch.Size:
        """The shape of this rank's shard, without the padding."""
        return self.parameter.to_local().shape


@dataclasses.dataclass(frozen=True)
class Unit:
    """A module that fully_shard was applied to, with its own parameters.

    Attributes:
        name: the name of the module.
        pieces: the module's parameters, in the order in which their gradients are concatenated.
    """

    name: str
    pieces: tuple[Piece, ...]
    _module: FSDPModule
    _group: Any  # FSDP's parameter group

    @property
    def numel(self) -> int:
        return sum(piece.padded for piece in self.pieces)

    @property
    def device(self) -> torch.device:
        """The device of the gradients. Offloaded parameters are on a different device."""
        device: torch.device = self._group.device
        return device

    @property
    def in_backward(self) -> bool:
        """Whether FSDP is in a backward pass. The end of a nested pass changes nothing."""
        return fsdp_in_backward(self._module)

    @property
    def reduction(self) -> str:
        """The reduction over the shards, which FSDP applies before the hook. By default "mean".

        With other reductions, FSDP may also divide the gradient after the hook, by a number that
        depends on the number of shards.
        """
        group = self._group
        policy = group.mp_policy
        dtype = policy.reduce_dtype or policy.param_dtype or self.pieces[0].parameter.dtype
        factor, sums = group.gradient_divide_factor, group.force_sum_reduction_for_comms
        if factor is None and not sums and dtype != torch.float16:
            return "mean"
        shards = self.pieces[0].parameter.device_mesh.size()
        return f"{'sum' if sums else 'mean'} of {shards} in {dtype}, divide factor {factor}"

    def hook(self, hook: Callable[[Tensor], None]) -> None:
        """Register `hook`, which FSDP calls with the unit's gradient reduced over the shards.

        Raises:
            ValueError: there already is a hook.
        """
        if fsdp_hook(self._group) not in (None, closed):
            raise ValueError(
                f"dct::{OP}: model must have no all-reduce hook on {self._label}, got one"
            )
        self._module.set_all_reduce_hook(hook)

    def close(self) -> None:
        """Make the next backward pass raise, because replicas would diverge without the hook."""
        self._module.set_all_reduce_hook(closed)

    def require(self, flat: Tensor) -> None:
        """Raise if `flat` is not the gradient of all pieces, or if all-reduce is turned off."""
        if not self._group.all_reduce_grads:
            raise ValueError(
                f"dct::{OP}: gradients must be accumulated with set_requires_gradient_sync(False)"
                ", got set_requires_all_reduce(False)"
            )
        if flat.numel() != self.numel:
            raise ValueError(
                f"dct::{OP}: gradient must have {self.numel} elements, of all parameters of "
                f"{self._label} that required grad when the hook was made (for unused ones, call "
                f"model.set_reduce_scatter_unused_params(True)), got {flat.numel()}"
            )

    @property
    def _label(self) -> str:
        return f"module {self.name}" if self.name else "the root module"


def closed(flat: Tensor) -> None:
    """The all-reduce hook of a closed state."""
    raise RuntimeError(f"dct::{OP}: state must be open, got a closed one")


def units_of(model: nn.Module, mesh: DeviceMesh) -> list[Unit]:
    """Return the units of a model wrapped on the shard dimension of `mesh`, in module order.

    Raises:
        TypeError, ValueError: a module or parameter was wrapped differently.
    """
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    modules = [(name, m) for name, m in named if isinstance(m, FSDPModule)]
    if not modules:
        rule = "a module that fully_shard was applied to"
        if isinstance(model, DistributedDataParallel):
            rule += " (for a DDP module, register dct_hook with a DCTState)"
        checks.fail(OP, "model", rule, checks.shown(model), TypeError)
    for _, module in modules:
        module.reshard()
    names = {parameter: unwrapped(name) for name, parameter in model.named_parameters()}
    units: dict[int, Unit] = {}  # {id of FSDP's group: unit}; modules may share a group
    for name, module in modules:
        groups = fsdp_groups(module)
        if len(groups) > 1:
            raise ValueError(
                f"dct::{OP}: model must have one mesh for all parameters of module "
                f"{name or '(root)'}, got {len(groups)} parameter groups"
            )
        for group in groups:
            parameters = [p for p in fsdp_parameters(group) if p.requires_grad]
            pieces = tuple(_piece(names[p], p, mesh) for p in parameters)
            if pieces and id(group) not in units:
                units[id(group)] = Unit(name, pieces, module, group)
    covered = {piece.name for unit in units.values() for piece in unit.pieces}
    loose = [n for p, n in names.items() if p.requires_grad and n not in covered]
    if loose:
        raise ValueError(
            f"dct::{OP}: every parameter must be sharded by fully_shard, got {', '.join(loose)}"
        )
    if not units:
        raise ValueError(f"dct::{OP}: model must have parameters that require grad, got none")
    return list(units.values())


def _piece(name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> Piece:
    checks.require_dtype(OP, f"parameter {name}", parameter.dtype, checks.FLOATS)
    if parameter.is_meta:
        raise ValueError(
            f"dct::{OP}: parameter {name} must be on a device (materialize the model before the "
            "hook), got one on meta"
        )
    if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh["shard"]:
        rule = (
            'wrapped by fully_shard(module, mesh=mesh["shard"]), which leaves the mean over '
            "replicas to the hook"
        )
        got = "one that is not sharded"
        if isinstance(parameter, DTensor):
            got = f"one on {parameter.device_mesh}"
        raise ValueError(f"dct::{OP}: parameter {name} must be {rule}, got {got}")
    placement = parameter.placements[0]
    if type(placement) is not Shard:
        raise ValueError(
            f"dct::{OP}: parameter {name} must be sharded in one dimension, got "
            f"{parameter.placements}"
        )
    return Piece(name, parameter, placement.dim)
