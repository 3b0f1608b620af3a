"""The state of `compress_fully_shard`: the collectives of all modules, their bytes and damage."""

import uuid
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from dct_kernels import checks

from .. import groups
from .._torch import (
    NO_PASS,
    at_end_of_backward,
    backward_pass,
    fsdp_collectives,
    fsdp_divide_factor,
    fsdp_gathered_dtypes,
    fsdp_groups,
    fsdp_has_extension,
    fsdp_in_backward,
    fsdp_parameters,
    fsdp_reduced_dtype,
    fsdp_shard_group,
    fsdp_shard_numels,
)
from ..collectives import all_gather_bytes
from ..exchange.checkpoint import BY_NAME, TEXT, VERSION, VERSION_FIELD, checked, integer
from ..exchange.plan import aligned, describe, unwrapped
from ..exchange.results import HostCopy
from ..local_steps.weights import local
from .messages import OP, Count, GradientReduceScatter, MessageLayout, WeightGather


class CompressedUnit:
    """A module that was wrapped by itself, and its collectives once they are set.

    Attributes:
        name: of the module.
        group: the ranks that hold its shards.
        ranks: their global ranks.
        device: of the messages; parameters may be offloaded.
        parameters: {parameter: name}, in the order of the flat tensor that is gathered.
        numels: elements of each one's shard, as it is sent.
        gathered: the dtype in which FSDP2 gathers the parameters; None if there are several, which
            it gathers as bytes.
    """

    gather: WeightGather
    reduce: GradientReduceScatter

    def __init__(
        self, name: str, module: FSDPModule, group: Any, names: dict[nn.Parameter, str]
    ) -> None:
        self.name, self.group, self.device = name or "(root)", fsdp_shard_group(group), group.device
        self.ranks = dist.get_process_group_ranks(self.group)
        self.parameters = {p: names[p] for p in fsdp_parameters(group)}
        self.numels = fsdp_shard_numels(group)
        dtypes, self._reduced = fsdp_gathered_dtypes(group), fsdp_reduced_dtype(group)
        self.gathered = dtypes.pop() if len(dtypes) == 1 else None
        self._module, self._torchs = module, fsdp_collectives(group)
        if any(not type(one).__module__.startswith("torch.") for one in self._torchs):
            rule = f"no custom collective on module {self.name}"
            checks.fail(OP, "model", rule, "one", verb="have")
        if fsdp_has_extension(group):
            rule = "parameters without fsdp_pre_all_gather, which defines their messages"
            checks.fail(OP, "model", rule, f"one in module {self.name}", verb="have")
        if fsdp_divide_factor(group) is not None:  # within ReduceOp.PREMUL_SUM it is not visible
            module.set_force_sum_reduction_for_comms(True)

    def set(self, weights: str | None, gradients: str | None, count: Count) -> None:
        """Replace torch's collectives."""
        weights = weights if self.gathered in checks.FLOATS else None
        gathered = self._layout(weights, self.parameters)
        reduced = self._layout(gradients, [p for p in self.parameters if p.requires_grad])
        self.gather = WeightGather(self.group, gathered, count)
        self.reduce = GradientReduceScatter(self.group, reduced, count)
        self._set(self.gather, self.reduce)

    def close(self) -> None:
        """Restore torch's collectives."""
        self._set(*self._torchs)

    def _set(self, gather: Any, reduce: Any) -> None:
        self._module.set_custom_all_gather(gather)
        self._module.set_custom_reduce_scatter(reduce)

    def _layout(
        self, format: str | None, parameters: Collection[nn.Parameter]
    ) -> MessageLayout | None:
        if format is None or not parameters:
            return None
        numels = dict(zip(self.parameters, self.numels, strict=True))
        return MessageLayout([(numels[p], p.dim() < 2) for p in parameters], format)

    @property
    def in_backward(self) -> bool:
        return fsdp_in_backward(self._module)

    def plan(self) -> tuple[int, int, int, int]:
        """(parameters, elements of a shard, bytes of a gather, bytes of a reduce-scatter)."""
        whole = trained = 0
        for parameter, numel in zip(self.parameters, self.numels, strict=True):
            whole += numel * (self.gathered or parameter.dtype).itemsize
            trained += numel * self._reduced.itemsize * parameter.requires_grad
        sent = self.gather.message_bytes(self.gathered, whole)
        sent_back = self.reduce.message_bytes(self._reduced, trained)
        ranks = len(self.ranks)
        own = all_gather_bytes(sent, ranks), all_gather_bytes(sent_back, ranks)
        return len(self.parameters), sum(self.numels), *own

    def parameters_of(self, part: Tensor | None) -> dict[str, Tensor]:
        """{name: a DTensor like the parameter} of this rank's part [numel]; zeros of None."""
        saved = {}
        for parameter, name in self.parameters.items():
            saved[name] = torch.zeros_like(parameter, dtype=self.gathered)
        if part is not None:
            for own, numbers in zip(saved.values(), part.split(self.numels), strict=True):
                shard = local(own)
                shard.copy_(numbers[: shard.numel()].view(shard.shape))
        return saved

    def part_of(self, op: str, saved: dict[str, Any]) -> Tensor:
        """The reverse of `parameters_of`; raises if a value is not such a DTensor."""
        parts = []
        for (parameter, name), numel in zip(self.parameters.items(), self.numels, strict=True):
            value, shape = saved[name], local(parameter).shape
            like = isinstance(value, DTensor) and value.shape == parameter.shape
            if not like or (local(value).shape, value.dtype) != (shape, self.gathered):
                rule = f"a {self.gathered} DTensor of {list(parameter.shape)}, cut like the weight"
                checks.fail(op, f"kept of {name}", rule, type(value).__name__)
            numbers = local(value).flatten().to(self.device)
            parts.append(pad(numbers, (0, numel - len(numbers))))
        return torch.cat(parts)


def units_of(model: nn.Module) -> list[CompressedUnit]:
    """The modules of a model that `fully_shard` was applied to, in module order.

    Raises:
        TypeError, ValueError: there is none, or one cannot be compressed.
    """
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    if not modules:
        rule = "a module that fully_shard was applied to"
        checks.fail(OP, "model", rule, type(model).__name__, TypeError)
    for _, module in modules:
        module.reshard()
    names = {parameter: unwrapped(name) for name, parameter in model.named_parameters()}
    units: dict[int, CompressedUnit] = {}  # {id of FSDP's group: unit}
    for name, module in modules:
        found = fsdp_groups(module)
        if len(found) > 1:
            rule = f"one parameter group in module {name or '(root)'} (all on one mesh)"
            checks.fail(OP, "model", rule, len(found), verb="have")
        for group in found:
            if id(group) not in units:
                units[id(group)] = CompressedUnit(name, module, group, names)
    return list(units.values())


class CompressedShards:
    """The state of `compress_fully_shard`, whose documentation it shares.

    Attributes:
        step: backward passes that have ended.
    """

    def __init__(
        self, units: list[CompressedUnit], weights: str | None, gradients: str | None
    ) -> None:
        self._weights, self._gradients, self._units = weights, gradients, units
        self.step = 0
        self._bytes = self._step_bytes = 0  # since the last backward pass ended, and until then
        self._pass, self._in_step, self._open = NO_PASS, False, True
        # Senders and modules, and the status of all their messages when the last step ended.
        self._posted: tuple[list[tuple[int, str]], HostCopy] | None = None
        self._damage: str | None = None  # the error that every later call raises
        formats = {"weights": weights, "gradients": gradients}
        everyone = self._exchange(OP, {**formats, "run_id": uuid.uuid4().hex})
        self._run_id = next(iter(everyone.values()))["run_id"]
        groups.require_same(
            OP, {rank: {n: own[n] for n in formats} for rank, own in everyone.items()}
        )
        for group in dict.fromkeys(unit.group for unit in units):
            own = [unit for unit in units if unit.group is group]
            parameters = {p: name for unit in own for p, name in unit.parameters.items()}
            modules = ", ".join(unit.name for unit in own)
            values = {"model": describe(parameters), "modules": modules}
            groups.require_same(OP, self._exchange(OP, values, group))
        for unit in units:
            unit.set(weights, gradients, self._count)

    def close(self) -> None:
        """Restore torch's collectives, and forget the weights that were kept. Idempotent.

        Raises:
            RuntimeError: this rank received a damaged message. The state is closed all the same.
        """
        if self._open:
            self._open = False
            for unit in self._units:
                unit.close()
        self._look()

    def plan(self) -> str:
        """The bytes that this rank sends for each module, per gather and per reduce-scatter."""
        rows = [["module", "parameters", "numel", "bytes/gather", "bytes/reduce-scatter"]]
        plans = {unit: unit.plan() for unit in self._units}
        totals = [sum(column) for column in zip(*plans.values(), strict=True)]
        for name, numbers in [
            *((unit.name, plan) for unit, plan in plans.items()),
            ("total", totals),
        ]:
            rows.append([name, *(f"{number:,}" for number in numbers)])
        ranks = len(self._units[0].ranks)
        bfloat16 = f"{all_gather_bytes(2 * totals[1], ranks):,}"
        rows.append(["torch in bfloat16", "", "", bfloat16, bfloat16])
        lines = [f"FSDP2: weights {self._weights}, gradients {self._gradients}, ranks: {ranks}"]
        lines += aligned(rows)
        for unit in self._units:
            if self._weights is not None and unit.gather.layout is None:
                lines.append(f"{unit.name}: weights of several dtypes, which torch gathers.")
        kept = sum(unit.gather.kept_bytes(unit.gathered) for unit in self._units)
        if kept:
            lines.append(f"Every rank keeps the weights of the last gather: {kept:,} bytes.")
        return "\n".join(lines)

    def stats(self) -> dict[str, int | None]:
        """`step`: backward passes that have ended; `wire_bytes`: bytes that this rank sent for the
        shards in the last one and the forward passes before it, None before the first.

        Raises:
            RuntimeError: this rank received a damaged message.
        """
        self._look()
        return {"step": self.step, "wire_bytes": self._step_bytes if self.step else None}

    def state_dict(self) -> dict[str, Any]:
        """The step and, with "int4" weights, the weights that ranks keep. Copies.

        Call it on every rank, between steps. The kept weights are DTensors like the parameters, for
        torch.distributed.checkpoint, which takes the state itself, or for torch.save, one file per
        rank. A run that loads them together with the model continues bit for bit.

        Raises:
            RuntimeError: this rank received a damaged message.
        """
        self._look()
        gathered: dict[str, bool] = {}
        kept: dict[str, Tensor] = {}
        for unit in self._units:
            if not unit.gather.sends_changes:
                continue
            part = unit.gather.own_part()
            gathered[unit.name] = part is not None
            kept |= unit.parameters_of(part)
        numbers = {"version": VERSION, "run_id": self._run_id, "step": self.step}
        return {**numbers, "weights": str(self._weights), "gathered": gathered, "kept": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`. Collective: every rank calls it, before the next step.

        Without it, or with another format of weights, gathers start from whole weights, and bits
        differ. torch.distributed.checkpoint reshards the kept weights. A refused dict changes
        nothing.

        Raises:
            ValueError: made with a different version or for a different model; something in it is
                missing or of a wrong type or shape; or ranks load different states.
            TypeError: not a state dict.
            RuntimeError: this rank received a damaged message: load into a new state. Or another
                rank raised.
        """
        op = "load_state_dict"
        with groups.refusing(op, groups.require_group(op, None)):
            self._look()
            found = checked(op, state, _STATE)
            parts = self._kept_parts(op, found) if found["weights"] == str(self._weights) else {}
        values = {"run_id": found["run_id"], "step": found["step"]}
        groups.require_same(op, self._exchange(op, values))
        self._run_id, self.step = found["run_id"], found["step"]
        for unit in self._units:
            unit.gather.kept, unit.gather.resumed = None, parts.get(unit.name)

    def _kept_parts(self, op: str, found: dict[str, Any]) -> dict[str, Tensor]:
        """{module: this rank's part of the kept weights} of a state, checked."""
        units = [unit for unit in self._units if unit.gather.sends_changes]
        names = {name for unit in units for name in unit.parameters.values()}
        if difference := names ^ found["kept"].keys():
            got = f"a difference in {', '.join(sorted(difference))}"
            checks.fail(op, "kept", "the weights of this model", got)
        parts = {unit.name: unit.part_of(op, found["kept"]) for unit in units}
        return {name: part for name, part in parts.items() if found["gathered"].get(name)}

    def _exchange(
        self, op: str, values: dict[str, Any], group: dist.ProcessGroup | None = None
    ) -> dict[int, dict[str, Any]]:
        group = groups.require_group(op, group)
        return groups.exchange(op, values, group, groups.timeout_of(group, self._units[0].device))

    def _count(self, nbytes: int) -> None:
        """A collective is called in which this rank sends these bytes."""
        self._bytes += nbytes
        backward = backward_pass()
        if backward not in (NO_PASS, self._pass):
            self._pass, self._in_step = backward, True
            # FSDP2 may reduce gradients in a callback at the end of the backward pass. A callback
            # that is queued there comes last.
            at_end_of_backward(lambda nested: at_end_of_backward(self._end_step))

    def _end_step(self, nested: bool) -> None:
        if nested or not self._in_step:
            return
        self._in_step = any(unit.in_backward for unit in self._units)
        if not self._in_step:
            self.step += 1
            self._step_bytes, self._bytes = self._bytes, 0
            self._read()
            self._post()
            self._require_intact()

    def _post(self) -> None:
        """Copy the status of all messages so far to the host."""
        found = [
            (f"the {what} of {unit.name}", unit.ranks, collective.status)
            for unit in self._units
            for what, collective in (("weights", unit.gather), ("gradients", unit.reduce))
            if collective.status is not None
        ]
        if found:
            senders = [(rank, what) for what, ranks, _ in found for rank in ranks]
            self._posted = senders, HostCopy(torch.cat([status for _, _, status in found]))

    def _read(self) -> None:
        """Read the status that was posted, if any. Waits for its copy."""
        if self._posted is None:
            return
        (senders, copy), self._posted = self._posted, None
        damaged = [
            f"status {code} from rank {rank} in {what}"
            for (rank, what), code in zip(senders, copy.tolist(), strict=True)
            if code
        ]
        if damaged:
            self._damage = (
                f"dct::{OP}: every message must be intact, got {'; '.join(damaged)}: load a "
                "checkpoint into a new state"
            )

    def _look(self) -> None:
        """Read the status of all messages so far; waits for their exchanges."""
        self._post()
        self._read()
        self._require_intact()

    def _require_intact(self) -> None:
        if self._damage is not None:
            raise RuntimeError(self._damage)


_STATE = {
    "version": VERSION_FIELD,
    "run_id": TEXT,
    "step": integer(0),
    "weights": TEXT,
    "gathered": BY_NAME,
    "kept": BY_NAME,
}
