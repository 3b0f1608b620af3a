"""compress_fully_shard: compresses the weights and gradients that FSDP2 sends between shards."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from dct_kernels import backend_of, checks

from .. import groups
from .._torch import (
    NO_PASS,
    after_backward,
    backward_pass,
    fsdp_collectives,
    fsdp_gathered_dtypes,
    fsdp_has_extension,
    fsdp_mesh_groups,
)
from ..collectives import all_gather_bytes
from ..exchange.ledger import StepLedger
from ..exchange.plan import aligned, describe
from ..formats import require_format
from .collectives import GradientReduceScatter, WeightGather

if TYPE_CHECKING:
    from .units import Unit

OP = "compress_fully_shard"  # in errors
WEIGHTS = ("float32", "bfloat16", "int8")  # formats
GRADIENTS = (*WEIGHTS, "int4")


@checks.names_keywords
def compress_fully_shard(
    model: nn.Module,
    *,
    weights: str | torch.dtype | None = "int8",
    gradients: str | torch.dtype | None = "int8",
) -> "CompressedShardsState":
    """Quantize the weights and gradients that FSDP2 sends between the shards of a model.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        state = compress_fully_shard(model, weights="int8", gradients="int8")

    Call it on every rank after wrapping all modules. It replaces the all-gather and the
    reduce-scatter of every module. All ranks compute with bitwise equal rounded weights. The
    sharded parameters and the optimizer are not rounded. Vectors (parameters with fewer than two
    dimensions) are never rounded. Gradients are summed in float32, without error feedback. The sum
    of matrices is in rank order. torch's collectives remain in use for a module if messages would
    not be smaller (for gradients, than in float32), if its weights have several dtypes, or if some
    of its parameters have no gradient. Results are deterministic. See docs/guide/fsdp2.md.

    Args:
        model: modules that `fully_shard` was applied to, on a mesh of one or two dimensions. With
            two (HSDP), torch or `dct_fully_shard_hook` averages over replicas.
        weights: format of the all-gathers: "int8", "bfloat16", "float32" or a torch dtype. None:
            use torch's all-gather.
        gradients: format of the reduce-scatters, as for `weights`, or "int4".

    Returns:
        The state: `plan`, `stats`, `step`, `close`. It has nothing to save in checkpoints.

    Raises:
        ValueError, TypeError: an argument is out of range, ranks differ, or a module has several
            parameter groups, a custom collective, or a parameter with its own all-gather.
        RuntimeError: another rank of the mesh raised an error, or did not call this in time. Other
            ranks are not notified if `model` has no sharded module, because its mesh is unknown.

    Source: this project; ZeRO++ (arXiv 2306.10209) quantizes the collectives of sharded training.
    """
    from .units import mesh_groups, units_of  # FSDP2 takes a second to import

    meshes = mesh_groups(model)
    with groups.sharing_errors(OP, *meshes):
        if weights is not None:
            why = " ('int4' is only for gradients: use 'int8')"
            weights = require_format(OP, "weights", weights, WEIGHTS, why)
        if gradients is not None:
            gradients = require_format(OP, "gradients", gradients, GRADIENTS)
        units = units_of(OP, model)
        for unit in units:
            _require_compressible(unit)
    return CompressedShardsState(units, meshes, weights, gradients)


def _require_compressible(unit: "Unit") -> None:
    collectives = fsdp_collectives(unit.group)
    if any(not type(collective).__module__.startswith("torch.") for collective in collectives):
        rule = f"no custom collective on module {unit.name} (close the state that set it)"
        checks.fail(OP, "model", rule, "one", verb="have")
    if fsdp_has_extension(unit.group):
        rule = "parameters without fsdp_pre_all_gather, which defines their messages"
        checks.fail(OP, "model", rule, f"one in module {unit.name}", verb="have")
    unit.shard_group()


class CompressedShardsState:
    """The state that `compress_fully_shard` returns. It has nothing to save in checkpoints.

    After this rank has received a damaged message, `stats`, `close` and the end of every backward
    pass raise a RuntimeError. Then load a checkpoint into a new state.
    """

    def __init__(
        self,
        units: "list[Unit]",
        meshes: list[dist.ProcessGroup],
        weights: str | None,
        gradients: str | None,
    ) -> None:
        self._weights, self._gradients, self._units = weights, gradients, units
        self._ledger = StepLedger(OP)
        self._bytes = 0  # sent since the last step ended
        self._step_bytes: int | None = None  # sent in the last step
        self._pass, self._reduced, self._open = NO_PASS, False, True
        device = units[0].device
        run_ids = {}
        for number, group in enumerate(meshes, 1):  # each dimension of a mesh in turn
            members = [unit for unit in units if group in fsdp_mesh_groups(unit.group)]
            parameters = {p: n for unit in members for p, n in unit.parameters().items()}
            trained = {p: n for p, n in parameters.items() if p.requires_grad}
            names = ", ".join(unit.name for unit in members)
            values = {"weights": weights, "gradients": gradients, "model": describe(parameters)}
            values |= {"modules": names, "trained": describe(trained)}
            with groups.sharing_errors(OP, *meshes[number:]):
                run_ids[group] = groups.Agreement(OP, group, device, values).run_id
        # The groups in which ranks compare the order of modules. On CUDA there are none, because
        # the host would wait.
        self._order_groups = {
            group: groups.separate_group(group, run_ids[group], groups.timeout_of(group, device))
            for group in dict.fromkeys(unit.shard_group() for unit in units)
            if device.type == "cpu"
        }
        self._end_groups = groups.destroyer(self, *self._order_groups.values())
        self._defaults = [fsdp_collectives(unit.group) for unit in units]
        self._collectives = [
            (
                WeightGather(unit, gather, weights, partial(self._count, unit)),
                GradientReduceScatter(unit, reduce, gradients, partial(self._count_reduced, unit)),
            )
            for unit, (gather, reduce) in zip(units, self._defaults, strict=True)
        ]
        self._set(self._collectives)

    def _set(self, collectives: list[tuple[Any, Any]]) -> None:
        for unit, (gather, reduce) in zip(self._units, collectives, strict=True):
            unit.module.set_custom_all_gather(gather)
            unit.module.set_custom_reduce_scatter(reduce)

    @property
    def step(self) -> int:
        """The number of backward passes that reduced gradients."""
        return self._ledger.step

    def close(self) -> None:
        """Restore torch's collectives, even if this method raises an error. Idempotent."""
        if self._open:
            self._open = False
            self._set(self._defaults)
            self._end_groups()
        self._read()

    def plan(self) -> str:
        """Return a table of the bytes that this rank sends per module and collective."""
        ranks, modules = self._units[0].shard_group().size(), []
        for unit, collectives in zip(self._units, self._collectives, strict=True):
            shards = unit.shard_group().size()
            sent = (all_gather_bytes(each.message_bytes(), shards) for each in collectives)
            numel, trained = (sum(n for n, _ in unit.layout(only)) for only in (False, True))
            modules.append((unit.name, (len(unit.layout()), numel, *sent, trained)))
        total = [*map(sum, zip(*(numbers for _, numbers in modules), strict=True))]
        rows = [["module", "parameters", "numel", "bytes/gather", "bytes/reduce-scatter"]]
        for name, (*numbers, _) in [*modules, ("total", total)]:
            rows.append([name, *(f"{number:,}" for number in numbers)])
        dense = (all_gather_bytes(2 * numel, ranks) for numel in (total[1], total[-1]))
        rows.append(["torch in bfloat16", "", "", *(f"{nbytes:,}" for nbytes in dense)])
        lines = [
            f"FSDP2: weights {self._weights}, gradients {self._gradients}, ranks: {ranks}, "
            f"backend: {backend_of(self._units[0].device)}"
        ]
        lines += aligned(rows)
        for unit in self._units:
            if self._weights is not None and len({*fsdp_gathered_dtypes(unit.group)}) > 1:
                lines.append(f"{unit.name}: torch gathers its weights (several dtypes).")
        return "\n".join(lines)

    def stats(self) -> dict[str, int | None]:
        """Return the number of steps and the bytes of the last step.

        - `step`: number of backward passes that reduced gradients.
        - `wire_bytes`: bytes that this rank sent to other shards in the last step; None before the
          first step. Passes that do not reduce gradients count towards the next step.
        """
        self._read()
        return {"step": self.step, "wire_bytes": self._step_bytes}

    def _count(self, unit: "Unit", nbytes: int) -> None:
        """Count bytes of weights that this rank sends for this unit."""
        if backward_pass() == NO_PASS:
            self._end_step()
        self._require_same_order("weights", unit)
        self._bytes += nbytes

    def _count_reduced(self, unit: "Unit", nbytes: int) -> None:
        """Count bytes of gradients that this rank sends in a backward pass."""
        self._require_same_order("gradients", unit)
        self._bytes += nbytes
        self._reduced = True
        self._pass = after_backward(self._pass, self._end_step)

    def _require_same_order(self, what: str, unit: "Unit") -> None:
        """On the CPU, raise on all shards unless they begin the same exchange.

        gloo aborts the process if messages of two ranks differ in size.
        """
        if (group := self._order_groups.get(unit.shard_group())) is not None:
            groups.require_same_order(OP, [what, unit.name], group)

    def _end_step(self, nested: bool = False) -> None:
        """End the step, if gradients were reduced since the last step ended.

        A step that consists only of nested passes ends when weights are gathered or results read.
        """
        if self._reduced and not nested:
            self._reduced = False
            self._step_bytes, self._bytes = self._bytes, 0
            self._ledger.begin()
            self._record()
            self._ledger.end()

    def _record(self) -> None:
        """Record the status of all messages so far in the ledger."""
        for unit, collectives in zip(self._units, self._collectives, strict=True):
            for what, each in zip(("weights", "gradients"), collectives, strict=True):
                self._ledger.record(f"the {what} of {unit.name}", each)

    def _read(self) -> None:
        """Read the status of all messages so far. Waits for their exchanges."""
        if backward_pass() == NO_PASS:
            self._end_step()
        self._ledger.require_intact()
        self._record()
        self._ledger.read()
