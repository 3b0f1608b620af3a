"""The cycle of a step for all entry points: begin, reduce the buckets, read the results.

The host reads the results of a step at the end of the next backward pass, or when the user requests
them. If this rank received a damaged payload, that call and every later call raise an error.
Other ranks are not notified. They fail when this rank exits, or when the process group times out.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import __version__

from .._torch import span
from ..groups import exchange, require_same, sharing_errors, timeout_of
from ..user_warnings import logger
from .bucket import Bucket, Complete, Start, StepResults, Submit, run_now
from .first_step import FirstStep
from .loss_scale import LossScale
from .plan import BucketPlan, step_bytes
from .results import RecentStats
from .settings import Settings


class StepLedger:
    """The state of a run between its steps: id, step, damage, statistics and loss scale.

    Ranks compare their settings in the constructor. They compare their step and checkpoint before
    the first step, and again after every load.

    Args:
        op: the entry point, for error messages.
        group: the ranks, all of which construct a ledger.
        device: selects the backend of `group`, whose timeout bounds the wait for other ranks.
        settings: the settings of the codecs.
        to_compare: {name: JSON value}, which must be the same on every rank, like `settings`.
        loss_scale: the scale of the gradients, or None.
        start_step: number of steps before compression.
        step_name: the unit of `step`, for error messages.
        shards: the ranks that hold the shards of this rank's replica, or None. These ranks also
            compare everything, except to_compare["shard"].

    Attributes:
        rank: the rank of this process; valid after process groups are destroyed.
        run_id: created by the first rank when training starts, and kept in checkpoints.
        step: number of steps begun.
        packed: number of compressed steps before the current one; negative while steps are dense.
        sent: {number: bucket} for the buckets sent in this step.
        scales: the scale of the step's gradients and its inverse, or None and None.
        first_step: checks the first step of each optimizer; None afterwards.
        submit: runs a function after the exchanges of the step so far.
        non_finite: whether the results that were read since `begin` report a NaN or Inf.

    Raises:
        ValueError: settings differ between ranks.
        RuntimeError: a rank raised an error, or did not take part within the group's timeout.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup,
        device: torch.device,
        settings: Settings,
        to_compare: Mapping[str, Any],
        loss_scale: LossScale | None = None,
        start_step: int = 0,
        step_name: str = "step",
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        self._op = op
        self._step_name = step_name
        self._start_step = start_step
        self._group, self._shards, self._device = group, shards, device
        self._loss_scale = loss_scale
        self.first_step: FirstStep | None = None
        self.submit: Submit = run_now
        self._recent = RecentStats()
        values = {"version": __version__, **to_compare, **settings.to_compare()}
        values |= {"start_step": start_step, "grad_scaler": "given" if loss_scale else "none"}
        self.rank = dist.get_rank()
        self.run_id = uuid.uuid4().hex
        with sharing_errors(op, shards):
            self._join(values, group)
        if shards is not None:  # by now the first rank of `shards` has the id of its group
            self._join({name: values[name] for name in values if name != "shard"}, shards)
        self._checkpoint, self._start = "none", 0  # the checkpoint and step of the last load
        self._damage: str | None = None  # the error that every later call raises
        self._resume_at(0)

    def _join(self, values: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        """Compare settings with the ranks of a group, and use the run id of its first rank."""
        gathered = self._exchange(self._op, {**values, "run_id": self.run_id}, group)
        ids = [values.pop("run_id") for values in gathered.values()]
        require_same(self._op, gathered)
        self.run_id = ids[0]

    def _exchange(
        self, op: str, values: Mapping[str, Any], group: dist.ProcessGroup
    ) -> dict[int, dict[str, Any]]:
        return exchange(op, values, group, timeout_of(group, self._device))

    def _resume_at(self, step: int) -> None:
        self.step, self._number, self.non_finite = step, step, False
        self.packed = step - self._start_step - 1
        self.sent: dict[int, Bucket] = {}
        self.scales: tuple[Tensor | None, Tensor | None] = None, None
        self._open: set[object] = set()  # exchanges of the step that are pending or have failed
        self._failed = False  # whether an exchange had failed when `compare_step` was called
        self._posted = 0  # number of buckets of the step whose results were posted
        self._results: tuple[int, StepResults] | None = None  # (step, results) posted but not read
        self._compared = False  # whether the ranks have compared the step that they resume from
        if step < (start := self._start_step):
            logger.info("%s: steps %d to %d are dense (bfloat16)", self._op, step, start - 1)

    def begin(self, op: str, number: int | None = None) -> None:
        """Begin a step on every rank, without waiting for the exchanges of the last step.

        Args:
            op: the call that begins the step, for error messages.
            number: the number of the step in error messages; by default `step`.

        Raises:
            ValueError: ranks do not resume from the same step of the same run.
            RuntimeError: this rank received a damaged payload in an earlier step, or it cannot
                determine whether the last step was skipped.
        """
        self.compare(op)
        self._post()
        self.require_intact()
        self._settle()
        if self.first_step is not None and self.first_step.seen:
            self.end_first_step()
        self._number = self.step if number is None else number
        self.scales = self._loss_scale.begin() if self._loss_scale else (None, None)
        self.sent, self._posted = {}, 0  # the last step was applied or taken back
        self._failed = self.non_finite = False
        self._open = set()
        self.packed = self.step - self._start_step
        self.step += 1

    def compare(self, op: str, note: Callable[[], int] = int) -> list[int]:
        """Raise on every rank if the ranks do not resume from the same step of the same run.

        The first call, and the first call after `load` or `resume_at`, wait for all ranks up to the
        group's timeout and return the result of `note` on each rank. Other calls do nothing and
        return []. `op` is the call that every rank made, for error messages.
        """
        notes: list[int] = []
        if not self._compared:
            values = {"checkpoint": self._checkpoint, "run_id": self.run_id, "step": self._start}
            with sharing_errors(op, self._shards):
                gathered = self._exchange(op, {**values, "note": note()}, self._group)
                notes = [values.pop("note") for values in gathered.values()]
                require_same(op, gathered)
            if self._shards is not None:
                require_same(op, self._exchange(op, values, self._shards))
            self._compared = True
        return notes

    def compare_step(self, op: str) -> bool:
        """Raise on every rank if the ranks call `op` after different steps. Waits for all ranks.

        Returns True after a comparison. If an exchange failed on this rank, other ranks may be
        gone, so the method returns False without a comparison.

        Raises:
            RuntimeError: this rank received a damaged payload.
        """
        self.look()
        self.require_intact()
        self._failed |= bool(self._open)
        if not self._failed:
            require_same(op, self._exchange(op, {"step": self.step}, self._group))
        return not self._failed

    def watch(self, start: Start) -> Start:
        """Wrap `start`, so that its exchange counts as failed until it completes."""
        started, is_open = object(), self._open
        is_open.add(started)

        def complete(finish: Complete) -> None:
            finish()
            is_open.discard(started)

        def watched() -> Complete | None:
            finish = start()
            if finish is not None:
                return partial(complete, finish)
            is_open.discard(started)
            return None

        return watched

    def require_exchanged(self, op: str) -> None:
        """Raise if an exchange of the step failed, because the weights lack the sent entries."""
        if self._open:
            rule = "every exchange of the last step must succeed (call take_back first)"
            raise RuntimeError(f"dct::{op}: {rule}, got a failed one")

    def end(self) -> None:
        """End the backward pass. Reads the results of the previous step, and posts this step's.

        Waits for the exchanges of the previous step.

        Raises:
            RuntimeError: this rank received a damaged payload in an earlier step.
        """
        self.read()
        self.require_intact()
        self._post()

    def look(self) -> None:
        """Read the results of all steps, without raising. Waits for their exchanges."""
        self.read()
        self._post()
        self.read()

    def _post(self) -> None:
        """Start to copy the results of the last step to the host, unless the copy has started.

        If a call reads the results between two buckets of a step, the step is posted twice.
        """
        if len(self.sent) > self._posted:
            self.read()  # the previous step, if `end` was not called
            self._posted = len(self.sent)
            self._results = self._number, StepResults(self.sent, self.submit)

    def read(self) -> None:
        """Read the results that were posted, if any. Waits for their exchanges."""
        if self._results is None:
            return
        (number, posted), self._results = self._results, None
        with span("dct::wait"):
            results = posted.read()
        self._recent.add(list(results.values()))
        self.non_finite |= any(result.non_finite for result in results.values())
        damaged = [
            f"{what} in bucket {index}" for index, r in results.items() for what in r.damaged
        ]
        if damaged:
            self._damage = (
                f"dct::{self._op}: every payload of {self._step_name} {number} must be "
                f"intact, got {'; '.join(damaged)}: load a checkpoint into a new state"
            )

    def require_intact(self) -> None:
        """Raise if a payload was damaged in a step that was read."""
        if self._damage is not None:
            raise RuntimeError(self._damage)

    def finish(self) -> None:
        """Finish the last step: read its results, and take back its entries if it was skipped.

        Raises:
            RuntimeError: a payload was damaged, or the ledger cannot determine whether the step was
                skipped.
        """
        self.look()
        self.require_intact()
        self._settle()

    def _settle(self) -> None:
        if self._loss_scale is not None and self._loss_scale.skipped():
            logger.info("%s: step %d was skipped by the GradScaler", self._op, self._number)
            self.take_back()

    def take_back(self) -> None:
        """Return the entries of the last step to the residuals. Idempotent."""
        self._open.clear()
        if self._results is not None:
            self._results[1].wait_posted()  # because taking back overwrites headers
        while self.sent:
            self.sent.popitem()[1].take_back()

    def end_first_step(self) -> None:
        """Stop watching optimizers."""
        if self.first_step is not None:
            self.first_step.close()
            self.first_step = None

    def stats(self, plans: Sequence[BucketPlan]) -> dict[str, float | int | None]:
        """Means over the last 100 steps, and the bytes per step; see `DCTState.stats`."""
        compressed = self.packed >= 0 and self.step > self._start
        return {
            "step": self.step,
            "density": self._recent.density,
            "overflow": self._recent.overflow,
            "wire_bytes": step_bytes(plans) if compressed else None,
        }

    def resume_at(self, step: int, start: int) -> None:
        """Continue this run at `step` without a checkpoint. `start` is the caller's step number.

        All ranks must call this method. It does not communicate.
        """
        self._start = start
        self._resume_at(step)

    def load(self, entry: Mapping[str, Any], step: int | None = None) -> None:
        """Resume from an entry of a checkpoint. Pass `step` if the entry counts other steps.

        All ranks must call this method. It does not communicate.
        """
        self.run_id = entry["run_id"]
        self._checkpoint = f"one of {entry['world_size']} ranks"
        self._start = entry["step"]
        self._recent = RecentStats()
        self._resume_at(entry["step"] if step is None else step)
