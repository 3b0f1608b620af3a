"""The cycle of a step, written once: it begins, buckets are reduced, the host reads the results.

The host reads the results of a step at the end of the next backward pass, or when the user asks. A
rank that received a damaged payload raises then, and in every later call. Other ranks are not
notified: they fail when this rank exits, or when the process group times out.
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
from ..groups import exchange, refusing, require_same, timeout_of
from .bucket import Bucket, Complete, Start, StepResults, Submit, run_now
from .first_step import FirstStep
from .loss_scale import LossScale
from .plan import BucketPlan, step_bytes
from .results import RecentStats
from .settings import Settings


class StepLedger:
    """The state between the steps of one run: its id, step, damage, statistics and loss scale.

    Ranks compare their settings when it is made, and their step and checkpoint before the first
    step after that and after every load.

    Args:
        op: for errors.
        group: the ranks; all of them make one.
        device: the timeout of its backend bounds the wait for other ranks.
        settings: of the codecs.
        to_compare: {name: value that JSON can hold}; like `settings` the same on every rank.
        loss_scale: of the gradients, if they are scaled.
        start_step: steps before compression.
        step_name: the unit of `step`, for errors.
        shards: if `group` reduces one of several shards, the ranks that hold the other shards. They
            compare everything but to_compare["shard"] with this rank.

    Attributes:
        rank: of this process; known after its process groups are destroyed.
        run_id: made by the first rank when training starts, and kept in checkpoints.
        step: steps begun.
        packed: compressed steps before the one that was begun last; negative while steps are dense.
        sent: {number: bucket} of the step, in which its buckets are entered as they are sent.
        scales: of the gradients of the step, and its inverse; None if there is none.
        first_step: checks the first steps of optimizers; None once it has.
        submit: runs a function after the exchanges of the step so far, if they run elsewhere.
        non_finite: whether a gradient of the step that was read last was not finite.

    Raises:
        ValueError: settings differ; the text names the ranks and their values.
        RuntimeError: a rank refuses, or does not compare within the group's timeout.
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
        with refusing(op, shards):
            self._join(values, group)
        if shards is not None:  # its first rank has the id of its group by now
            self._join({name: values[name] for name in values if name != "shard"}, shards)
        self._checkpoint, self._start = "none", 0  # what this rank resumes from
        self._damage: str | None = None  # the error that every later call raises
        self._resume_at(0)

    def _join(self, values: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        """Compare settings with the ranks of a group, and take the first one's run id."""
        everyone = self._exchange(self._op, {**values, "run_id": self.run_id}, group)
        ids = [values.pop("run_id") for values in everyone.values()]
        require_same(self._op, everyone)
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
        self._open: set[object] = set()  # exchanges of the step that have not succeeded
        self._failed = False  # whether one failed before `compare_step`, as if a rank was gone
        self._posted = 0  # buckets of the step whose results are posted, or read
        self._results: tuple[int, StepResults] | None = None  # posted, of the step of this number
        self._compared = False  # whether ranks resume from the same step

    def begin(self, op: str, number: int | None = None) -> None:
        """Begin a step, on every rank. Does not wait for the exchanges of the last one.

        Args:
            op: the call that begins it, for errors.
            number: as errors call it; by default steps are counted from 0.

        Raises:
            ValueError: ranks do not resume from the same step of the same run.
            RuntimeError: this rank received a damaged payload in a step that was read, or it is not
                known whether the last step was skipped.
        """
        self.compare(op)
        self._post()
        self.require_intact()
        self._settle()
        if self.first_step is not None and self.first_step.seen:
            self.end_first_step()
        self._number = self.step if number is None else number
        self.scales = self._loss_scale.begin() if self._loss_scale else (None, None)
        self.sent, self._posted = {}, 0  # those of the last step were applied, or taken back
        self._failed = self.non_finite = False
        self._open = set()
        self.packed = self.step - self._start_step
        self.step += 1

    def compare(self, op: str, note: Callable[[], int] = int) -> list[int]:
        """Raise on every rank if they do not resume from the same step of the same run.

        Only the first time, and after `load` or `resume_at`: then it waits for all ranks, up to the
        group's timeout, and returns the result of `note` on every rank of the group; otherwise [].
        Errors call it `op`, which every rank must have called.
        """
        notes: list[int] = []
        if not self._compared:
            values = {"checkpoint": self._checkpoint, "run_id": self.run_id, "step": self._start}
            with refusing(op, self._shards):
                everyone = self._exchange(op, {**values, "note": note()}, self._group)
                notes = [values.pop("note") for values in everyone.values()]
                require_same(op, everyone)
            if self._shards is not None:
                require_same(op, self._exchange(op, values, self._shards))
            self._compared = True
        return notes

    def compare_step(self, op: str) -> bool:
        """Raise on every rank if they call `op` after different steps. Waits for all ranks.

        Returns False, without a comparison, if an exchange that was watched failed on this rank,
        as others may be gone.

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
        """`start`, which has failed unless it and the function that it returns complete."""
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
        """Raise if an exchange of the step failed, because its entries are in no weights."""
        if self._open:
            rule = "every exchange of the last step must succeed (call take_back first)"
            raise RuntimeError(f"dct::{op}: {rule}, got a failed one")

    def end(self) -> None:
        """The backward pass has ended: read the results of the step before, and post this one's.

        Waits for the exchanges of the step before.

        Raises:
            RuntimeError: this rank received a damaged payload in the step before, or earlier.
        """
        self.read()
        self.require_intact()
        self._post()

    def look(self) -> None:
        """Read the results of all steps. Waits for their exchanges; does not raise."""
        self.read()
        self._post()
        self.read()

    def _post(self) -> None:
        """Copy the results of the last step to the host, unless that was done.

        Twice if a call read them between two of its buckets.
        """
        if len(self.sent) > self._posted:
            self.read()  # of the step before, if its end was not seen
            self._posted = len(self.sent)
            self._results = self._number, StepResults(self.sent, self.submit)

    def read(self) -> None:
        """Read the results that were posted, if there are any; waits for their exchanges."""
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
        """Raise if a payload was damaged, in any step that was read."""
        if self._damage is not None:
            raise RuntimeError(self._damage)

    def finish(self) -> None:
        """Finish the last step: read its results, and take back the entries of a skipped one.

        Raises:
            RuntimeError: a payload was damaged, now or before; or it is not known whether the step
                was skipped.
        """
        self.look()
        self.require_intact()
        self._settle()

    def _settle(self) -> None:
        if self._loss_scale is not None and self._loss_scale.skipped():
            self.take_back()

    def take_back(self) -> None:
        """Return the entries of the last step to the residuals. Idempotent."""
        self._open.clear()
        if self._results is not None:
            self._results[1].wait_posted()  # taking back overwrites headers
        while self.sent:
            self.sent.popitem()[1].take_back()

    def end_first_step(self) -> None:
        """Watch optimizers no longer."""
        if self.first_step is not None:
            self.first_step.close()
            self.first_step = None

    def stats(self, plans: Sequence[BucketPlan]) -> dict[str, float | int | None]:
        """Means of the last 100 steps, and the bytes of a step: see `DCTState.stats`."""
        compressed = self.packed >= 0 and self.step > self._start
        return {
            "step": self.step,
            "density": self._recent.density,
            "overflow": self._recent.overflow,
            "wire_bytes": step_bytes(plans) if compressed else None,
        }

    def resume_at(self, step: int, start: int) -> None:
        """Continue this run at `step`, which the caller counts as `start`, without a checkpoint.

        All ranks call it, each at its own time.
        """
        self._start = start
        self._resume_at(step)

    def load(self, entry: Mapping[str, Any], step: int | None = None) -> None:
        """Resume from a checkpoint's entry; at `step`, if the entry counts something else.

        All ranks call it, each at its own time.
        """
        self.run_id = entry["run_id"]
        self._checkpoint = f"one of {entry['world_size']} ranks"
        self._start = entry["step"]
        self._recent = RecentStats()
        self._resume_at(entry["step"] if step is None else step)
