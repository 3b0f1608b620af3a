"""Counts the steps of a state, and reports damaged payloads.

The host reads the results of a step at the end of the next backward pass, or when the user requests
them. If this rank received a damaged payload, or an exchange failed on this rank, that call and
every later call raise an error. Other ranks are not notified. They fail when this rank exits, or
when the process group times out.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .._torch import span
from ..user_warnings import logger
from .optimizers import LossScale, OptimizerChecks
from .plan import BucketPlan, step_bytes
from .results import Exchange, RecentStats, RunAfter, StepResults, run_now


class Step(NamedTuple):
    """A step of training.

    Attributes:
        compressed: number of compressed steps before this one, or None if this step is dense.
        scale, inv_scale: the scale of the step's gradients and its inverse, or None.
    """

    compressed: int | None
    scale: Tensor | None = None
    inv_scale: Tensor | None = None


class StepLedger:
    """Counts steps, reads the results of their exchanges, and takes back skipped steps.

    `begin`, `end`, `read` and `finish` also raise the errors of `require_intact`.

    Args:
        op: the entry point, for error messages.
        start_step: number of dense steps before compression starts.
        loss_scale: the scale of the gradients, or None.
        optimizers: checks of the optimizers, or None.
        run_after: runs a function after all exchanges that were started, possibly later.
        unit: what a step is, for error messages.

    Attributes:
        step: number of steps begun.
        current: the last step begun; a dense step before the first one and after `restart`.
        non_finite: whether the results that were read since `begin` report a NaN or Inf.
    """

    def __init__(
        self,
        op: str,
        start_step: int = 0,
        loss_scale: LossScale | None = None,
        optimizers: OptimizerChecks | None = None,
        run_after: RunAfter = run_now,
        unit: str = "step",
    ) -> None:
        self._op, self._unit, self._start_step = op, unit, start_step
        self._loss_scale, self._optimizers = loss_scale, optimizers
        self._run_after = run_after
        self._damage: str | None = None  # the error that every later call raises
        self.restart(0)

    def restart(self, step: int) -> None:
        """Continue after `step` steps as `resume` does, with new statistics."""
        self._recent = RecentStats()
        self.resume(step)
        if step < (start := self._start_step):
            logger.info("%s: steps %d to %d are dense (bfloat16)", self._op, step, start - 1)

    def resume(self, step: int) -> None:
        """Continue after `step` steps. Drops all exchanges, and results that were not read.

        Damage and failures that were read still raise.
        """
        self.step, self._number, self.non_finite = step, step, False
        self.current = Step(None)
        self._exchanges: dict[str, Exchange] = {}  # recorded in the current step
        self._unposted = False  # whether some of them were recorded after the last `_post`
        self._posted: tuple[int, StepResults] | None = None  # (step, its results), not read yet
        if self._optimizers is not None:
            self._optimizers.forget_step()

    def begin(self, number: int | None = None) -> Step:
        """Begin a step, without waiting for the exchanges of the last step if it has ended.

        Args:
            number: the number of the step in error messages; by default `step`.
        """
        if self._unposted:  # the step did not end, perhaps because an exchange failed
            self.read()
        self.require_intact()
        self._settle()
        if self._optimizers is not None:
            self._optimizers.begin(self._number)
        self._number = self.step if number is None else number
        self._exchanges, self.non_finite = {}, False  # the last step was applied or taken back
        compressed = self.step - self._start_step
        scales = self._loss_scale.begin() if self._loss_scale else (None, None)
        self.current = Step(compressed if compressed >= 0 else None, *scales)
        self.step += 1
        return self.current

    def record(self, name: str, exchange: Exchange) -> None:
        """Record an exchange of the current step before it starts. `name` is for error messages."""
        self._exchanges[name], self._unposted = exchange, True

    def end(self) -> None:
        """End the step: read the results of the previous step, and start to copy those of this one.

        Waits for the exchanges of the previous step.
        """
        self._read_posted()
        self.require_intact()
        self._post()

    def read(self) -> None:
        """Read the results of all steps. Waits for their exchanges."""
        self._read_posted()
        self._post()
        self._read_posted()
        self.require_intact()

    def finish(self) -> None:
        """Read the results of all steps, and take back the last step if a GradScaler skipped it.

        Raises:
            RuntimeError: it cannot be determined whether the step was skipped.
        """
        self.read()
        self._settle()

    def require_intact(self) -> None:
        """Raise if the results read so far report a damaged payload or a failed exchange."""
        if self._damage is not None:
            raise RuntimeError(self._damage)

    def take_back(self) -> None:
        """Return the entries of the last step to the residuals. Idempotent."""
        if self._posted is not None:
            self._posted[1].wait_posted()  # because taking back overwrites headers
        self._unposted = False
        while self._exchanges:
            self._exchanges.popitem()[1].take_back()
        if self._optimizers is not None:
            self._optimizers.forget_step()

    def stats(self, plans: Sequence[BucketPlan]) -> dict[str, float | int | None]:
        """Means over the last 100 steps, and the bytes per step; see `DCTState.stats`."""
        return {
            "step": self.step,
            "density": self._recent.density,
            "overflow": self._recent.overflow,
            "wire_bytes": None if self.current.compressed is None else step_bytes(plans),
        }

    def _post(self) -> None:
        """Start to copy the results of the step to the host, unless the copy has started.

        If a call reads the results between two buckets of a step, the step is posted twice.
        """
        if self._unposted:
            self._read_posted()  # the previous step, if `end` was not called
            self._posted = self._number, StepResults(self._exchanges, self._run_after)
            self._unposted = False

    def _read_posted(self) -> None:
        """Read the results that were posted, if any. Waits for their exchanges."""
        if self._posted is None:
            return
        (number, posted), self._posted = self._posted, None
        with span("dct::wait"):
            results = posted.read()
        self._recent.add(number, list(results.values()))
        if any(result.non_finite for result in results.values()):
            self.non_finite = True
            if self._optimizers is not None:
                self._optimizers.non_finite(number)
        damaged = [f"{what} in {name}" for name, r in results.items() for what in r.damaged]
        if damaged:
            rule = f"every payload of {self._unit} {number} must be intact"
            got = f"{'; '.join(damaged)}: load a checkpoint into a new state"
            self._damage = f"dct::{self._op}: {rule}, got {got}"

    def _settle(self) -> None:
        if self._loss_scale is not None and self._loss_scale.skipped():
            logger.info("%s: step %d was skipped by the GradScaler", self._op, self._number)
            self.take_back()
