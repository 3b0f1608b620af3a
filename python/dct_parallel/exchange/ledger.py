"""The cycle of a step, written once: its start, its result, and telling other ranks of damage.

A step begins, buckets are reduced, and before the next step the host reads the results. Then the
rank that received damage in step t sees it. In step t + 1 its headers tell the others (in step t,
if the transport sends a second time), who find them in their results of that step.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor
from torch.profiler import record_function

from .bucket import AnyBucket, Bucket
from .loss_scale import LossScale
from .plan import BucketPlan, step_bytes
from .recent_stats import RecentStats
from .results import Verdict, join
from .run_guard import RunGuard

_Result = TypeVar("_Result")


class StepLedger:
    """The state between the steps of one run: step, damage, statistics and loss scale.

    Args:
        op: the name in errors of damage.
        guard: compares ranks as a step begins.
        loss_scale: of the gradients, if they are scaled.
        start_step: steps before compression.
        step_name: the unit of `step`, for the error.
        advice: the end of the error.

    Attributes:
        step: steps begun.
        verdict: of the last step, as far as this rank has looked.
        damage: the error of a damaged payload, if there was one.
    """

    def __init__(
        self,
        op: str,
        guard: RunGuard,
        loss_scale: LossScale | None = None,
        start_step: int = 0,
        step_name: str = "step",
        advice: str = ": go back to a checkpoint",
    ) -> None:
        self._op, self._step_name, self._start_step = op, step_name, start_step
        self._advice = advice
        self._guard = guard
        self._loss_scale = LossScale(op, None) if loss_scale is None else loss_scale
        self._recent = RecentStats()
        self._go_on_at(0)

    def _go_on_at(self, step: int) -> None:
        self.step = self._number = step
        self.verdict = Verdict()
        self._sent: dict[int, AnyBucket] = {}  # of the last step, until taken back
        self.damage: str | None = None  # the error that every later step raises
        self._unannounced = False  # to the other ranks

    @property
    def run_id(self) -> str:
        """See `RunGuard.id`."""
        return self._guard.id

    @property
    def compresses(self) -> bool:
        """Whether the step that was begun last is past the dense ones."""
        return self.step > self._start_step

    @property
    def packed(self) -> int:
        """Compressed steps before this one."""
        return self.step - self._start_step - 1

    def begin(self, number: int | None = None) -> None:
        """Begin a step: after `finish`, and on every rank.

        Args:
            number: as errors call it; by default steps are counted from 0.

        Raises:
            ValueError: ranks do not go on from the same step of the same run.
        """
        self._number = self.step if number is None else number
        self._guard.begin_step(self._number)
        self._loss_scale.begin()
        self._sent = {}  # is applied, or was taken back
        self.verdict = Verdict()
        self.step += 1

    def compare(self, number: int) -> None:
        """Raise on every rank if they do not go on, after a load, from the same step, this number:
        for exchanges outside of steps."""
        self._guard.begin_step(number)

    def carry_out(self, collectives: Callable[[], _Result]) -> _Result:
        """The result of `collectives`; for all exchanges of a step. See `RunGuard.carry_out`."""
        return self._guard.carry_out(collectives)

    def reduction(self, number: int, bucket: AnyBucket, buffer: Tensor) -> Callable[[], Tensor]:
        """A function that reduces `buffer` by this bucket of the step, on any thread."""
        self._sent[number] = bucket
        return partial(self.carry_out, partial(self._reduce, bucket, buffer))

    def start(self, bucket: Bucket, buffer: Tensor) -> None:
        """Begin to send a step's only bucket: see `Bucket.start`."""
        self._sent[0] = bucket
        self.carry_out(partial(bucket.start, buffer))

    def _reduce(self, bucket: AnyBucket, buffer: Tensor) -> Tensor:
        bucket.reduce(buffer, self._loss_scale.value, self._loss_scale.inverse)
        return buffer

    def look(self) -> None:
        """Learn how the last step went on this rank. Waits for its exchanges."""
        with record_function("dct::wait"):
            taken = {number: bucket.take_result() for number, bucket in sorted(self._sent.items())}
        results = {number: result for number, result in taken.items() if result is not None}
        if not results:
            return
        verdicts = [self.verdict]  # of buckets that were read before the step's end
        for number, result in results.items():
            damaged = [f"{damage} in bucket {number}" for damage in result.verdict.damaged]
            verdicts.append(result.verdict._replace(damaged=damaged))
        self._recent.note([result.traffic for result in results.values()])
        self.hear(join(verdicts))

    def hear(self, verdict: Verdict) -> None:
        """Set the last step's verdict, this rank's own or the one that all ranks agreed on."""
        self.verdict = verdict
        self._loss_scale.saw(overflow=verdict.non_finite)
        when = f"{self._step_name} {self._number}"
        if verdict.damaged:
            self.damage = self._error(f"of {when}", "; ".join(verdict.damaged))
        elif verdict.told:
            got = f"a damaged one on rank {verdict.told[0]}"
            self.damage = self._error(f"up to {when}", got)
        # If others told of it, all ranks know that training ends here.
        self._unannounced = bool(verdict.damaged) and not verdict.told

    def finish(self, announce: Callable[[], None] | None = None) -> None:
        """Finish the last step: raise if a payload was damaged, now or before, and take back the
        entries of a step that a GradScaler skipped.

        Args:
            announce: lets buckets announce damage to the other ranks, if they are reduced next.

        Raises:
            RuntimeError: a payload was damaged.
        """
        self.look()
        if announce is not None and self._unannounced:
            self._unannounced = False
            announce()
        if self.damage is not None:
            raise RuntimeError(self.damage)
        if self._loss_scale.skipped():
            self.take_back()

    def take_back(self) -> None:
        """Return the entries of the last step to the residuals. Idempotent."""
        while self._sent:
            self._sent.popitem()[1].take_back()

    def undo(self) -> None:
        """Take back the last step, which no rank applied, and forget its damage."""
        self.take_back()
        self.damage, self._unannounced = None, False

    def stats(self, plans: Sequence[BucketPlan]) -> dict[str, float | int | None]:
        """Means of the last 100 steps, and the bytes of a step: see `DCTState.stats`."""
        return {
            "step": self.step,
            "density": self._recent.density,
            "overflow": self._recent.overflow,
            "wire_bytes": step_bytes(plans),
        }

    def saved(self) -> dict[str, Any]:
        """Its part of a checkpoint's entry."""
        return {"run_id": self.run_id, "step": self.step, "recent": self._recent.state()}

    def load(self, entry: Mapping[str, Any], step: int | None = None) -> None:
        """Go on from a checkpoint's entry; at `step`, if the entry's counts something else."""
        self._guard.load(entry["run_id"], entry["world_size"])
        self._recent.load(entry.get("recent"))  # which early states leave out
        self._loss_scale.saw(overflow=False)
        self._go_on_at(entry["step"] if step is None else step)

    def _error(self, when: str, got: str) -> str:
        return f"dct::{self._op}: every payload {when} must be intact, got {got}{self._advice}"
