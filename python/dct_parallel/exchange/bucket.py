"""One bucket: a flat tensor packed, exchanged and unpacked in place."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from .plan import BucketPlan
from .readback import Readback
from .results import ExchangeResult
from .segment_state import SegmentState
from .transport import Transport

# One step in 23 checks whether anything is sent of a parameter, because that takes some kernels
# more. A parameter is silent if nothing was found for a thousand steps.
LOOK_EVERY, SILENT_STEPS = 23, 1000


class AnyBucket(Protocol):
    """The methods of a bucket that a step calls; `Bucket` documents them."""

    plan: BucketPlan

    def reduce(
        self, buffer: Tensor, scale: Tensor | None = None, inv_scale: Tensor | None = None
    ) -> None: ...

    def announce_damage(self) -> None: ...

    def take_result(self) -> ExchangeResult | None: ...

    def take_back(self) -> None: ...

    def states(self) -> dict[str, SegmentState]: ...

    def parameter_stats(self) -> dict[str, dict[str, float]]: ...

    def silent(self) -> list[str]: ...


def parameter_stats(buckets: Iterable[AnyBucket]) -> dict[str, dict[str, float]]:
    """{parameter: figures of the last step on this rank}: see `DCTState.parameter_stats`."""
    return {
        name: figures for bucket in buckets for name, figures in bucket.parameter_stats().items()
    }


class Bucket:
    """The codec and the transport of one bucket.

    Args:
        plan: names and sizes, in the bucket's order.
        group: the ranks to average over.
        device: of the gradients.
        step: compressed steps taken so far.
        states: {name: from `states`} to start from; missing names start from zero.
        watches: whether `silent` will be called.
    """

    def __init__(
        self,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        device: torch.device,
        step: int,
        states: dict[str, SegmentState],
        watches: bool = True,
    ) -> None:
        self.plan = plan
        self._watches = watches and plan.settings.density < 1
        self.codec = plan.settings.codec(plan.range_bounds, device, step)
        assert issubclass(plan.transport, Transport)
        self._transport = plan.transport(plan, self.codec, group)
        for index, name in enumerate(plan.names):
            if name in states:
                self._load(index, states[name])
        self._readback = Readback()
        self._raw_status: Sequence[Tensor] = ()  # of the last `reduce`
        self._fresh = False  # not read by `take_result` yet
        self._first_step = step
        self._bounds = torch.tensor(plan.bounds, device=device)
        self._found = torch.full((len(plan.names),), step, device=device)  # when last sent

    def reduce(
        self, buffer: Tensor, scale: Tensor | None = None, inv_scale: Tensor | None = None
    ) -> None:
        """Replace this rank's gradients in `buffer` by their mean over the group.

        Args:
            buffer: float32, bfloat16 or float16 [numel], in units of `scale`.
            scale, inv_scale: a GradScaler's scale and its inverse, or None.
        """
        self._pack(buffer, inv_scale)
        self.finish(buffer, scale)

    def start(self, buffer: Tensor) -> None:
        """Pack `buffer`, which is free then, and begin to send. Call `finish` before the next
        `start`, because the payload is sent from its own memory."""
        self._pack(buffer)
        self._transport.start()

    def _pack(self, buffer: Tensor, inv_scale: Tensor | None = None) -> None:
        with record_function("dct::pack"):
            self.codec.pack(buffer, inv_scale)
            if self._watches and self.codec.step % LOOK_EVERY == 0:
                found = self.codec.sent_of(self._bounds) > 0
                self._found.masked_fill_(found, self.codec.step)

    def finish(self, out: Tensor, scale: Tensor | None = None) -> None:
        """Write the mean over the group of all ranks' payloads into `out`."""
        self._raw_status = self._transport.reduce(out, scale)
        with record_function("dct::read_back"):
            self._readback.post(*self._raw_status)
        self._fresh = True

    def fault_flags(self) -> Tensor:
        """Damage and overflow of the last `reduce`, on the device: see `Transport.fault_flags`."""
        return self._transport.fault_flags(self._raw_status)

    def announce_damage(self) -> None:
        """Take part in a `reduce` of the others without a gradient, only to tell them of damage."""
        self._transport.announce_damage()

    def take_result(self) -> ExchangeResult | None:
        """The result of the last `reduce`, once; None if there is nothing new.

        Call it before the next `reduce`, which overwrites the result.
        """
        if not self._fresh:
            return None
        self._fresh = False
        return self._transport.result(self._readback.wait())

    def take_back(self) -> None:
        """Return the entries of the last `reduce` to the residual, for a step not applied."""
        self._transport.take_back()

    def residuals(self) -> list[Tensor]:
        """This rank's own, and that of the range it owns, in units of the mean, if it owns one."""
        owned = self._transport.owned
        return [self.codec.residual] if owned is None else [self.codec.residual, owned[1]]

    def add_owed(self, total: Tensor) -> None:
        """Add all that this rank has not sent [numel], in units of the group's sum."""
        total += self.codec.residual
        if self._transport.owned is not None:
            low, residual = self._transport.owned
            total[low : low + len(residual)] += self.plan.ranks * residual

    def states(self) -> dict[str, SegmentState]:
        """{name: a copy, on the CPU, of the parameter's state}."""
        residuals = self.codec.residual.split(self.plan.sizes)
        return {
            name: SegmentState(residual.to("cpu", copy=True), self._transport.owner_state(index))
            for index, (name, residual) in enumerate(zip(self.plan.names, residuals, strict=True))
        }

    def _load(self, index: int, state: SegmentState) -> None:
        residual = self.codec.residual.split(self.plan.sizes)[index]
        residual.copy_(state.residual)
        if state.owner is not None:
            others = self._transport.load_owner(index, state.owner)
            residual += (self.plan.ranks * others).to(residual.device)  # each rank counts 1 / P

    def parameter_stats(self) -> dict[str, dict[str, float]]:
        """{name: see `DCTState.parameter_stats`}, of the last `reduce`. Waits for the device."""
        if self.codec.step == self._first_step or not self.plan.names:
            return {}
        starts = torch.tensor(self.plan.range_bounds[1:], device=self._bounds.device)
        ranges = torch.searchsorted(starts, self._bounds[:-1], right=True)
        columns = {
            "density": self.codec.sent_of(self._bounds) / self._bounds.diff().clamp(min=1),
            "threshold": self.codec.threshold[ranges.clamp(max=self.plan.ranges - 1)],
            "residual_norm": torch.stack(
                torch._foreach_norm(self.codec.residual.split(self.plan.sizes))
            ),
        }
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        return {
            name: dict(zip(columns, row, strict=True))
            for name, row in zip(self.plan.names, rows, strict=True)
        }

    def silent(self) -> list[str]:
        """Parameters of which the checked steps sent nothing for 1,000 steps. Waits for the
        device."""
        if not self._watches:
            return []
        silent = (self.codec.step - self._found >= SILENT_STEPS).tolist()
        of_all = zip(self.plan.names, self.plan.sizes, silent, strict=True)
        return [name for name, size, is_so in of_all if is_so and size]
