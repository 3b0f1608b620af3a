"""The state of `compress_fully_shard`: counts bytes, reports damage and saves the kept weights."""

import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks

from .. import groups
from .._torch import NO_PASS, at_end_of_backward, backward_pass
from ..collectives import all_gather_bytes
from ..exchange.checkpoint import BY_NAME, TEXT, VERSION, VERSION_FIELD, checked, integer
from ..exchange.plan import aligned, describe
from ..exchange.results import HostCopy
from .compress import OP
from .compressed_units import CompressedUnit, UnitPlan

_STATE = {
    "version": VERSION_FIELD,
    "run_id": TEXT,
    "step": integer(0),
    "weights": TEXT,
    "gathered": BY_NAME,
    "kept": BY_NAME,
}


class CompressedShards:
    """The state that `compress_fully_shard` returns.

    With "int4" weights, the state keeps a copy of the whole model, called the kept weights.

    Attributes:
        step: number of backward passes that reduced gradients.
    """

    def __init__(
        self, units: list[CompressedUnit], weights: str | None, gradients: str | None
    ) -> None:
        self._weights, self._gradients, self._units = weights, gradients, units
        self.step = 0
        self._bytes = 0  # sent since the last step ended
        self._step_bytes: int | None = None  # sent in the last step
        self._pass, self._reduced, self._open = NO_PASS, False, True
        # (sender, description) of all messages, and the statuses when the last step ended.
        self._posted: tuple[list[tuple[int, str]], HostCopy] | None = None
        self._damage: str | None = None  # the error that every later call raises
        formats = {"weights": weights, "gradients": gradients}
        gathered = self._exchange(OP, {**formats, "run_id": uuid.uuid4().hex})
        ids = [values.pop("run_id") for values in gathered.values()]
        groups.require_same(OP, gathered)
        self._run_id = ids[0]
        for group in dict.fromkeys(unit.group for unit in units):
            members = [unit for unit in units if unit.group is group]
            parameters = {p: n for unit in members for n, p in unit.parameters().items()}
            trained = {p: n for p, n in parameters.items() if p.requires_grad}
            values = {
                "model": describe(parameters),
                "modules": ", ".join(unit.name for unit in members),
                "trained": describe(trained),
            }
            groups.require_same(OP, self._exchange(OP, values, group))
        for unit in units:
            unit.set(weights, gradients, self._count, self._count_reduced)

    def close(self) -> None:
        """Restore torch's collectives and discard the kept weights. Idempotent.

        Raises:
            RuntimeError: this rank received a damaged message. The state is closed nevertheless.
        """
        if self._open:
            self._open = False
            for unit in self._units:
                unit.close()
        self._look()

    def plan(self) -> str:
        """Return a table of the bytes that this rank sends per module and collective."""
        rows = [["module", "parameters", "numel", "bytes/gather", "bytes/reduce-scatter"]]
        plans = [(unit, unit.plan()) for unit in self._units]
        totals = UnitPlan(*map(sum, zip(*(plan for _, plan in plans), strict=True)))
        for name, plan in [*((unit.name, plan) for unit, plan in plans), ("total", totals)]:
            numbers = plan.parameters, plan.numel, plan.gather_bytes, plan.reduce_bytes
            rows.append([name, *(f"{number:,}" for number in numbers)])
        ranks = len(self._units[0].ranks)
        dense = (all_gather_bytes(2 * n, ranks) for n in (totals.numel, totals.trained_numel))
        rows.append(["torch in bfloat16", "", "", *(f"{nbytes:,}" for nbytes in dense)])
        lines = [f"FSDP2: weights {self._weights}, gradients {self._gradients}, ranks: {ranks}"]
        lines += aligned(rows)
        for unit in self._units:
            if self._weights is not None and unit.gathered_dtype is None:
                lines.append(f"{unit.name}: torch gathers its weights (several dtypes).")
        if any(unit.keeps_weights for unit in self._units):
            kept = sum(plan.kept_bytes for _, plan in plans)
            lines.append(f"Every rank keeps the weights of the last gather: {kept:,} bytes.")
        return "\n".join(lines)

    def stats(self) -> dict[str, int | None]:
        """Return the number of steps and the bytes of the last step.

        - `step`: number of backward passes that reduced gradients.
        - `wire_bytes`: bytes that this rank sent to other shards in the last step; None before the
          first step. Passes that do not reduce gradients count towards the next step.

        Raises:
            RuntimeError: this rank received a damaged message.
        """
        self._look()
        return {"step": self.step, "wire_bytes": self._step_bytes}

    def state_dict(self) -> dict[str, Any]:
        """Return the step and, with "int4" weights, copies of the kept weights.

        Call it on every rank, between steps. The kept weights are DTensors like the parameters.
        Pass the state itself to torch.distributed.checkpoint, or use torch.save with one file per
        rank. A run that loads the kept weights together with the model resumes bit for bit.

        Raises:
            RuntimeError: this rank received a damaged message.
        """
        self._look()
        gathered: dict[str, bool] = {}
        kept: dict[str, Tensor] = {}
        for unit in self._units:
            if unit.keeps_weights:
                gathered[unit.name] = unit.gather.kept_part() is not None
                kept |= unit.kept_parameters()
        numbers = {"version": VERSION, "run_id": self._run_id, "step": self.step}
        return {**numbers, "weights": str(self._weights), "gathered": gathered, "kept": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`. Collective: every rank calls it before the next step.

        Without this call, or with a different format of weights, the next gather sends weights
        instead of changes, and results are not bitwise equal. torch.distributed.checkpoint reshards
        the kept weights. If this call raises an error, nothing has changed.

        Raises:
            ValueError: the dict has a different version or model, a value is missing or has a wrong
                type or shape, or ranks load different states.
            TypeError: `state` is not a state dict.
            RuntimeError: this rank received a damaged message (load into a new state), or another
                rank raised an error.
        """
        op = "load_state_dict"
        with groups.sharing_errors(op, groups.require_group(op, None)):
            self._look()
            found = checked(op, state, _STATE)
            parts = self._kept_parts(op, found) if found["weights"] == str(self._weights) else {}
        values = {"run_id": found["run_id"], "step": found["step"]}
        groups.require_same(op, self._exchange(op, values))
        self._run_id, self.step = found["run_id"], found["step"]
        for unit in self._units:
            unit.gather.restart(parts.get(unit.name))

    def _kept_parts(self, op: str, found: dict[str, Any]) -> dict[str, Tensor]:
        """Check the kept weights of a state. Return {module: this rank's part}."""
        units = [unit for unit in self._units if unit.keeps_weights]
        names = {name for unit in units for name in unit.names}
        if difference := names ^ found["kept"].keys():
            got = f"a difference in {', '.join(sorted(difference))}"
            checks.fail(op, "kept", "the weights of this model", got)
        parts = {unit.name: unit.flat_part(op, found["kept"]) for unit in units}
        return {name: part for name, part in parts.items() if found["gathered"].get(name)}

    def _exchange(
        self, op: str, values: dict[str, Any], group: dist.ProcessGroup | None = None
    ) -> dict[int, dict[str, Any]]:
        group = groups.require_group(op, group)
        return groups.gather_values(
            op, values, group, groups.timeout_of(group, self._units[0].device)
        )

    def _count(self, nbytes: int) -> None:
        """Count bytes of weights that this rank sends."""
        if backward_pass() == NO_PASS:
            self._end_step()
        self._bytes += nbytes

    def _count_reduced(self, nbytes: int) -> None:
        """Count bytes of gradients that this rank sends in a backward pass."""
        self._bytes += nbytes
        self._reduced = True
        backward = backward_pass()
        if backward != self._pass:
            self._pass = backward
            # FSDP2 may reduce gradients in a callback at the end of the backward pass. A callback
            # that is queued inside a callback runs after all others.
            at_end_of_backward(lambda nested: at_end_of_backward(self._end_backward))

    def _end_backward(self, nested: bool) -> None:
        if not nested:
            self._end_step()

    def _end_step(self) -> None:
        """End the step, if gradients were reduced since the last step ended.

        A step that consists only of nested passes ends when weights are gathered or results read.
        """
        if self._reduced:
            self._reduced = False
            self.step += 1
            self._step_bytes, self._bytes = self._bytes, 0
            self._read()
            self._post()
            self._require_intact()

    def _post(self) -> None:
        """Start to copy the status of all messages so far to the host."""
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
        """Read the status of all messages so far. Waits for their exchanges."""
        self._end_step()
        self._post()
        self._read()
        self._require_intact()

    def _require_intact(self) -> None:
        if self._damage is not None:
            raise RuntimeError(self._damage)
