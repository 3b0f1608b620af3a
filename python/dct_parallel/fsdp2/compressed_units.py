"""The modules that `compress_fully_shard` compresses, with their collectives and weights."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from dct_kernels import checks

from .._torch import (
    fsdp_collectives,
    fsdp_divide_factor,
    fsdp_gathered_dtypes,
    fsdp_groups,
    fsdp_has_extension,
    fsdp_parameters,
    fsdp_reduced_dtype,
    fsdp_shard_group,
    fsdp_shard_numels,
)
from ..collectives import all_gather_bytes
from ..exchange.plan import unwrapped
from .compress import OP
from .messages import MessageLayout, message_layout
from .shard_collectives import Count, GradientReduceScatter, WeightGather


class UnitPlan(NamedTuple):
    """The sizes of one or several modules, and the bytes that this rank sends and keeps."""

    parameters: int
    numel: int  # of a shard
    gather_bytes: int
    trained_numel: int  # of a shard, for the parameters that require grad
    reduce_bytes: int
    kept_bytes: int  # the size of the weights that a rank keeps


class CompressedUnit:
    """A module that fully_shard was applied to, and its collectives.

    Attributes:
        name: the name of the module.
        group: the ranks that hold its shards.
        ranks: the global ranks of `group`.
        device: the device of the messages. Offloaded parameters are on a different device.
        names: the names of the parameters, in the order of the gathered flat tensor.
        numels: the padded size of each parameter's shard.
    """

    gather: WeightGather
    reduce: GradientReduceScatter

    def __init__(
        self, name: str, module: FSDPModule, fsdp_group: Any, names: dict[nn.Parameter, str]
    ) -> None:
        self.name, self.device = name or "(root)", fsdp_group.device
        self._module, self._fsdp_group = module, fsdp_group
        self._defaults = fsdp_collectives(fsdp_group)
        label, parameters = f"module {self.name}", fsdp_parameters(fsdp_group)
        if any(not type(default).__module__.startswith("torch.") for default in self._defaults):
            rule = f"no custom collective on {label} (close the state that set it)"
            checks.fail(OP, "model", rule, "one", verb="have")
        if fsdp_has_extension(fsdp_group):
            rule = "parameters without fsdp_pre_all_gather, which defines their messages"
            checks.fail(OP, "model", rule, f"one in {label}", verb="have")
        if any(parameter not in names for parameter in parameters):
            rule = f"all parameters that were wrapped together with {label}"
            checks.fail(OP, "model", rule, "a part of them", verb="have")
        group = fsdp_shard_group(fsdp_group)
        if group is None:
            checks.fail(OP, "model", "sharded by fully_shard", f"{label} that is replicated")
        self.group, self.ranks = group, dist.get_process_group_ranks(group)
        self.names = [names[parameter] for parameter in parameters]
        self.numels = fsdp_shard_numels(fsdp_group)

    def set(
        self, weights: str | None, gradients: str | None, count: Count, count_reduced: Count
    ) -> None:
        """Replace torch's collectives with compressed collectives."""
        gather, reduce = self._defaults
        self.gather = WeightGather(self.group, lambda: self._layout(weights), gather, count)
        self.reduce = GradientReduceScatter(
            self.group,
            lambda: self._layout(gradients, trained=True),
            reduce,
            count_reduced,
            lambda: fsdp_divide_factor(self._fsdp_group),
        )
        self._set(self.gather, self.reduce)

    def close(self) -> None:
        """Restore torch's collectives and discard the kept weights."""
        self._set(*self._defaults)
        self.gather.restart()

    def _set(self, gather: Any, reduce: Any) -> None:
        self._module.set_custom_all_gather(gather)
        self._module.set_custom_reduce_scatter(reduce)

    def _sent(self, trained: bool) -> list[tuple[nn.Parameter, int]]:
        """The parameters that are gathered (or reduced, if `trained`), and their shard sizes."""
        sent = zip(fsdp_parameters(self._fsdp_group), self.numels, strict=True)
        return [(p, numel) for p, numel in sent if p.requires_grad or not trained]

    def _layout(self, format: str | None, trained: bool = False) -> MessageLayout | None:
        sent = tuple((numel, p.dim() < 2) for p, numel in self._sent(trained))
        return message_layout(sent, format) if sent and format is not None else None

    @property
    def gathered_dtype(self) -> torch.dtype | None:
        """The dtype in which FSDP2 gathers, or None if it gathers several dtypes as bytes."""
        dtypes = set(fsdp_gathered_dtypes(self._fsdp_group))
        return dtypes.pop() if len(dtypes) == 1 else None

    @property
    def keeps_weights(self) -> bool:
        layout = self.gather.layout_for(self.gathered_dtype)
        return layout is not None and layout.format == "int4"

    def plan(self) -> UnitPlan:
        dtypes = fsdp_gathered_dtypes(self._fsdp_group)
        reduced, trained = fsdp_reduced_dtype(self._fsdp_group), self._sent(trained=True)
        numel = sum(numel for _, numel in trained)
        gather = sum(n * dtype.itemsize for n, dtype in zip(self.numels, dtypes, strict=True))
        reduce = numel * reduced.itemsize if reduced is not None else 0
        if (layout := self.gather.layout_for(self.gathered_dtype)) is not None:
            gather = layout.nbytes(dtypes[0])
        if reduced is not None and (layout := self.reduce.layout_for(reduced)) is not None:
            reduce = layout.nbytes(reduced)
        ranks, shard = len(self.ranks), sum(self.numels)
        return UnitPlan(
            len(dtypes),
            shard,
            all_gather_bytes(gather, ranks),
            numel,
            all_gather_bytes(reduce, ranks),
            # All shards, and a copy of this rank's weights from when it last sent a change.
            (ranks + 1) * shard * dtypes[0].itemsize if self.keeps_weights else 0,
        )

    def parameters(self) -> dict[str, DTensor]:
        """The sharded parameters."""
        self._module.reshard()
        sharded: Any = fsdp_parameters(self._fsdp_group)
        return dict(zip(self.names, sharded, strict=True))

    def kept_parameters(self) -> dict[str, Tensor]:
        """The kept weights as a DTensor per parameter, or zeros before the first gather."""
        part, saved = self.gather.kept_part(), {}
        for name, parameter in self.parameters().items():
            saved[name] = torch.zeros_like(parameter, dtype=self.gathered_dtype)
        if part is not None:
            for value, numbers in zip(saved.values(), part.split(self.numels), strict=True):
                shard = _local(value)
                shard.copy_(numbers[: shard.numel()].view(shard.shape))
        return saved

    def flat_part(self, op: str, saved: dict[str, Any]) -> Tensor:
        """Return this rank's part [numel] of `saved`, an earlier result of `kept_parameters`.

        Raises an error if a DTensor does not match its parameter.
        """
        parts, dtype = [], self.gathered_dtype
        for (name, parameter), numel in zip(self.parameters().items(), self.numels, strict=True):
            value, shape = saved[name], _local(parameter).shape
            matches = isinstance(value, DTensor) and value.shape == parameter.shape
            if not matches or (_local(value).shape, value.dtype) != (shape, dtype):
                rule = f"a {dtype} DTensor of {list(parameter.shape)}, sharded like the weight"
                checks.fail(op, f"kept of {name}", rule, checks.shown(value))
            numbers = _local(value).flatten().to(self.device)
            parts.append(pad(numbers, (0, numel - len(numbers))))
        return torch.cat(parts)


@torch.no_grad()
def _local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, detached and in the same memory."""
    part: Tensor = tensor.to_local()
    return part.detach()


def units_of(model: nn.Module) -> list[CompressedUnit]:
    """Return the modules of a model that `fully_shard` was applied to, in module order.

    Raises:
        TypeError, ValueError: there is no such module, or a module cannot be compressed.
    """
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    modules = [(name, m) for name, m in named if isinstance(m, FSDPModule)]
    if not modules:
        rule = "a module that fully_shard was applied to"
        checks.fail(OP, "model", rule, checks.shown(model), TypeError)
    for _, module in modules:
        module.reshard()
    names = {parameter: unwrapped(name) for name, parameter in model.named_parameters()}
    units: dict[int, CompressedUnit] = {}  # {id of FSDP's group: unit}; modules may share a group
    for name, module in modules:
        groups = fsdp_groups(module)
        if len(groups) > 1:
            rule = f"one parameter group in module {name or '(root)'} (all on one mesh)"
            checks.fail(OP, "model", rule, len(groups), verb="have")
        for group in groups:
            if id(group) not in units:
                units[id(group)] = CompressedUnit(name, module, group, names)
    return list(units.values())
