"""One bucket of DDP's: packed, exchanged and unpacked in place."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..compressor import Compressor
from ..readback import Readback
from .bucket_plan import BucketPlan
from .checkpoint import SegmentState
from .transports import Receipt, Transport


class Report(NamedTuple):
    """What the host learns of a bucket one step later; tensors have an item per parameter."""

    receipt: Receipt
    threshold: Tensor  # float32, for the next step
    passed: Tensor  # int32: entries that passed the threshold on this rank
    sent: Tensor  # int64: those of them that the payload had room for
    compressed_sent: int  # in all, of the parameters that are compressed,
    compressed: int  # of so many elements


class AnyBucket(Protocol):
    """What a state asks of a bucket, however it is sent; `Bucket` says what each of these does."""

    plan: BucketPlan

    def reduce(
        self, buffer: Tensor, scale: Tensor | None = None, inv_scale: Tensor | None = None
    ) -> None: ...

    def tell_damage(self) -> None: ...

    def take_report(self) -> Report | None: ...

    def take_back(self) -> None: ...

    def states(self) -> dict[str, SegmentState]: ...

    def parameter_stats(self) -> dict[str, dict[str, float | int]]: ...


class PartBucket(AnyBucket, Protocol):
    """And what a node's rank asks of the bucket of its part."""

    def alarms(self) -> Tensor: ...

    def owe(self, more: Tensor) -> None: ...


class Bucket:
    """The compressor and the transport of one bucket.

    Args:
        plan: names and sizes, in the bucket's order.
        group: the ranks to average over.
        device: of the gradients.
        step: compressed steps taken so far, where the refresh schedule goes on.
        states: {name: what `states` gave} to start from; missing names start from zero.
    """

    def __init__(
        self,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        device: torch.device,
        step: int,
        states: dict[str, SegmentState],
    ) -> None:
        self.plan = plan
        self.report: Report | None = None  # the last one taken
        self.compressor = _compressor(plan, device, step)
        assert issubclass(plan.transport, Transport)  # else nothing is packed: plan.ranges is 0
        self._transport = plan.transport(plan, self.compressor, group, step)
        for index, name in enumerate(plan.names):
            if name in states:
                self._load(index, states[name])
        self._readback = Readback()
        self._own = [self.compressor.seen, self.compressor.threshold.view(torch.int32)]
        self._whole = torch.tensor(sorted(plan.whole), dtype=torch.int64)
        self._notes: Sequence[Tensor] = ()  # of the last `reduce`
        self._fresh = False  # which has not been reported yet

    def reduce(
        self, buffer: Tensor, scale: Tensor | None = None, inv_scale: Tensor | None = None
    ) -> None:
        """Replace this rank's gradients in `buffer` by their mean over the group.

        Args:
            buffer: float32, bfloat16 or float16 [numel], in units of `scale`.
            scale, inv_scale: a GradScaler's scale and its inverse, or None.
        """
        with record_function("dct::pack"):
            self.compressor.pack(buffer, inv_scale)
        self._notes = self._transport.reduce(buffer, scale)
        with record_function("dct::read_back"):
            self._readback.post(*self._own, *self._notes)
        self._fresh = True

    def alarms(self) -> Tensor:
        """What is wrong with the last `reduce`, on the device: see `Transport.alarms`."""
        return self._transport.alarms(self._notes)

    def owe(self, more: Tensor) -> None:
        """Add `more`, float32 [numel], to what this rank owes."""
        self.compressor.residual += more

    def tell_damage(self) -> None:
        """Take part in a `reduce` of the others with no gradient, only to tell them of damage."""
        self._transport.tell_damage()

    def take_report(self) -> Report | None:
        """What the last `reduce` left to be known, once; None if there is nothing new.

        To be called before the next `reduce`, which overwrites what is read here.
        """
        if not self._fresh:
            return None
        self._fresh = False
        passed, threshold, *notes = self._readback.wait()
        threshold = threshold.view(torch.float32)
        self.compressor.resample_if_flooded(passed, threshold)
        receipt = self._transport.receipt(notes)
        sent = self._sent(passed, receipt.counts)
        compressed = sent.sum() - sent[self._whole].sum()
        self.report = Report(
            receipt, threshold, passed, sent, int(compressed), self.plan.compressed_numel
        )
        return self.report

    def _sent(self, passed: Tensor, counts: list[int]) -> Tensor:
        """Of what passed, how much there was room for, by parameter."""
        if len(counts) == 1:  # packed in order, as long as there is room
            room = self.compressor.capacity - (passed.cumsum(0) - passed)
            return torch.minimum(passed, room.clamp(min=0))
        # Which range a parameter's entries lie in is not known: what is late is every one's.
        return (passed * (sum(counts) / max(int(passed.sum()), 1))).round().long()

    def take_back(self) -> None:
        """Return what the last `reduce` sent to the residual, for a step that was not applied."""
        self._transport.take_back()

    def states(self) -> dict[str, SegmentState]:
        """{name: copies of what each of its parameters must carry to go on elsewhere}."""
        return {
            name: self.compressor.segment_state(index) | self._transport.segment_state(index)
            for index, name in enumerate(self.plan.names)
        }

    def _load(self, index: int, state: SegmentState) -> None:
        self.compressor.load_segment(index, state)
        owed = self._transport.load_segment(index, state)
        if owed is not None:  # to the mean, of which a rank makes 1 / P
            low, high = self.compressor.bounds[index : index + 2]
            self.compressor.residual[low:high] += (self.plan.ranks * owed).to(
                self.compressor.residual.device
            )

    def parameter_stats(self) -> dict[str, dict[str, float | int]]:
        """{name: see `DCTState.parameter_stats`}, of the report taken last."""
        if self.report is None or not self.plan.names:
            return {}
        passed = self.report.passed
        norms = torch._foreach_norm(self.compressor.residual.split(self.plan.sizes))
        columns = {
            "density": self.report.sent / torch.tensor(self.plan.sizes).clamp(min=1),
            "threshold": self.report.threshold,
            "threshold_age": self.compressor.step - 1 - self.compressor.sampled_at,
            "overflow": (passed - self.report.sent) / passed.clamp(min=1),
            "residual_norm": torch.stack(norms),
        }
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        return {
            name: dict(zip(columns, row, strict=True))
            for name, row in zip(self.plan.names, rows, strict=True)
        }


def _compressor(plan: BucketPlan, device: torch.device, step: int) -> Compressor:
    compressor = Compressor(
        plan.bounds[-1],
        plan.bounds,
        plan.settings.density,
        refresh_every=plan.settings.refresh_every,
        policy=plan.settings.policy,
        value_dtype=plan.settings.value_dtype,
        whole=plan.whole,
        capacity=plan.capacity,
        ranges=plan.ranges,
        device=device,
    )
    compressor.step = step
    compressor.sampled_at.fill_(step)
    return compressor
