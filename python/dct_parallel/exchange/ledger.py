"""The cycle of a step, written once: it begins, buckets are reduced, the host reads the results.

Results are read before the next step. A rank that received a damaged payload raises then, and in
every later call; it tells nobody, so the others fail as if it were gone. What is not finite is
known to all ranks.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from dct_kernels import __version__

from ..groups import exchange, refusing, require_same, timeout_of
from .bucket import Bucket
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
        device: the timeout of its backend bounds the wait for the others.
        settings: of the codecs.
        told: {name: value that JSON can hold}, with `settings` the same on every rank.
        loss_scale: of the gradients, if they are scaled.
        start_step: steps before compression.
        step_name: the unit of `step`, for errors.
        shards: if what `group` reduces is one of several shards, the ranks that hold this rank's
            others. They go on with it: all that ranks compare is the same there, but told["shard"].

    Attributes:
        run_id: made by the first rank as training begins, and kept in checkpoints.
        step: steps begun.
        non_finite: whether a gradient of the last step was not finite, as far as was looked.

    Raises:
        ValueError: settings differ; it names every rank's.
        PeerError: some rank refuses, or does not tell its own within the group's timeout.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup,
        device: torch.device,
        settings: Settings,
        told: Mapping[str, Any],
        loss_scale: LossScale | None = None,
        start_step: int = 0,
        step_name: str = "step",
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        self._op, self._step_name, self._start_step = op, step_name, start_step
        self._group, self._shards, self._device = group, shards, device
        self._loss_scale = LossScale(op, None) if loss_scale is None else loss_scale
        self._recent = RecentStats()
        own = {"version": __version__, **told, **settings.as_told(), "start_step": start_step}
        own |= {"grad_scaler": self._loss_scale.as_told()}
        self.run_id = uuid.uuid4().hex
        with refusing(op, shards):
            self._join(own, group)
        if shards is not None:  # whose first rank has the id of its group by now
            self._join({name: own[name] for name in own if name != "shard"}, shards)
        self._checkpoint, self._start = "none", 0  # what this rank goes on from
        self._damage: str | None = None  # the error that every later call raises
        self._go_on_at(0)

    def _join(self, own: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        """Compare settings with the ranks of a group, and take the first one's run id."""
        everyone = self._everyones(self._op, {**own, "run_id": self.run_id}, group)
        ids = [values.pop("run_id") for values in everyone.values()]
        require_same(self._op, everyone)
        self.run_id = ids[0]

    def _everyones(
        self, op: str, own: Mapping[str, Any], group: dist.ProcessGroup
    ) -> dict[int, dict[str, Any]]:
        return exchange(op, own, group, timeout_of(group, self._device))

    def _go_on_at(self, step: int) -> None:
        self.step, self._number, self.non_finite = step, step, False
        self._sent: dict[int, Bucket] = {}  # of the last step, until taken back
        self._compared = False  # whether ranks know that they go on from the same step

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
        self.compare()
        self._loss_scale.begin()
        self._sent = {}  # is applied, or was taken back
        self.non_finite = False
        self.step += 1

    def compare(self) -> None:
        """Raise on every rank if they do not go on from the same step of the same run.

        Only the first time, and after a load: then it waits for all ranks, to the group's timeout.
        """
        if not self._compared:
            own = {"checkpoint": self._checkpoint, "run_id": self.run_id, "step": self._start}
            op = "load_state_dict"
            with refusing(op, self._shards):
                require_same(op, self._everyones(op, own, self._group))
            if self._shards is not None:
                require_same(op, self._everyones(op, own, self._shards))
            self._compared = True

    def reduction(self, number: int, bucket: Bucket) -> Callable[[Tensor], Tensor]:
        """A function that reduces a buffer by this bucket of the step, on any thread."""
        self._sent[number] = bucket
        return partial(self._reduce, bucket)

    def start(self, bucket: Bucket, buffer: Tensor) -> None:
        """Begin to send a step's only bucket: see `Bucket.start`."""
        self._sent[0] = bucket
        bucket.start(buffer)

    def _reduce(self, bucket: Bucket, buffer: Tensor) -> Tensor:
        bucket.reduce(buffer, self._loss_scale.value, self._loss_scale.inverse)
        return buffer

    def look(self) -> None:
        """Learn how the last step went on this rank. Waits for its exchanges."""
        with record_function("dct::wait"):
            taken = {number: bucket.take_result() for number, bucket in sorted(self._sent.items())}
        results = {number: result for number, result in taken.items() if result is not None}
        if not results:
            return
        self._recent.note(list(results.values()))
        # Buckets may have been read before the step's end.
        self.non_finite |= any(result.non_finite for result in results.values())
        damaged = [
            f"{what} in bucket {n}" for n, result in results.items() for what in result.damaged
        ]
        if damaged:
            self._damage = (
                f"dct::{self._op}: every payload of {self._step_name} {self._number} must be "
                f"intact, got {'; '.join(damaged)}: load a checkpoint into a new state"
            )

    def require_intact(self) -> None:
        """Raise if a payload was damaged, in any step that was looked at."""
        if self._damage is not None:
            raise RuntimeError(self._damage)

    def finish(self) -> None:
        """Finish the last step: take back the entries of one that a GradScaler skipped.

        Raises:
            RuntimeError: a payload was damaged, now or before; or it cannot be told whether the
                step was skipped.
        """
        self.look()
        self.require_intact()
        if self._loss_scale.skipped():
            self.take_back()

    def take_back(self) -> None:
        """Return the entries of the last step to the residuals. Idempotent."""
        while self._sent:
            self._sent.popitem()[1].take_back()

    def stats(self, plans: Sequence[BucketPlan]) -> dict[str, float | int | None]:
        """Means of the last 100 steps, and the bytes of a step: see `DCTState.stats`."""
        return {
            "step": self.step,
            "density": self._recent.density,
            "overflow": self._recent.overflow,
            "wire_bytes": step_bytes(plans),
        }

    def load(self, entry: Mapping[str, Any], step: int | None = None) -> None:
        """Go on from a checkpoint's entry; at `step`, if the entry's counts something else.

        All ranks call it, each at its own time.
        """
        self.run_id = entry["run_id"]
        self._checkpoint = f"one of {entry['world_size']} ranks"
        self._start = entry["step"]
        self._recent = RecentStats()
        self._go_on_at(entry["step"] if step is None else step)
