"""Buckets that are better sent whole: bfloat16, by an all-reduce."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from .. import wire
from ..collectives import dense_mean
from ..readback import Readback
from . import checkpoint
from .bucket import Report
from .bucket_plan import BucketPlan
from .checkpoint import SegmentState
from .link import Link
from .transports import Receipt


class Bf16:
    """What a plan asks of a transport, where nothing is compressed."""

    name = "bf16"

    @staticmethod
    def ranges(ranks: int) -> int:
        return 0

    @staticmethod
    def wire_bytes(plan: BucketPlan) -> int:
        return wire.all_reduce_bytes(2 * plan.numel, plan.ranks)

    @staticmethod
    def seconds(plan: BucketPlan, link: Link) -> float:
        return link.all_reduce.seconds(plan.wire_bytes) + plan.numel * link.cast


def unpacked_report(overflowed: bool) -> Report:
    """Of a step in which nothing was packed."""
    return Report(Receipt([], [], overflowed, [], 0, 0), 0)


class Bf16Bucket:
    """One bucket, as `Bucket`, that is averaged in bfloat16.

    What a state that it starts from still owes is added to its first gradient.
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
        self._group = group
        self._device = device
        sizes = zip(plan.names, plan.sizes, strict=True)
        known = [states.get(name, {"residual": torch.zeros(numel)}) for name, numel in sizes]
        owed = torch.cat([torch.zeros(0), *(checkpoint.owed(s, plan.ranks) for s in known)])
        self._owed = owed.to(device) if owed.any() else None
        self._sent: Tensor | None = None
        self._overflowed = torch.zeros(1, dtype=torch.int32, device=device)
        self._readback = Readback()
        self._fresh = False

    def reduce(
        self, buffer: Tensor, scale: Tensor | None = None, inv_scale: Tensor | None = None
    ) -> None:
        """Replace this rank's gradients in `buffer` by their mean over the group."""
        if self._owed is not None:
            buffer += self._owed if scale is None else self._owed * scale
        self._sent, self._owed = self._owed, None
        with record_function("dct::exchange_dense"):
            buffer.copy_(dense_mean(buffer, torch.bfloat16, self._group))
        if scale is not None:
            self._overflowed = buffer.isfinite().all().logical_not().int().view(1)
            self._readback.post(self._overflowed)
        self._fresh = scale is not None

    def alarms(self) -> Tensor:
        """As of a `Bucket`: only overflow is known of."""
        return F.pad(self._overflowed, (2, 0))

    def owe(self, more: Tensor) -> None:
        """Add `more`, float32 [numel], to what this rank owes."""
        self._owed = more if self._owed is None else self._owed + more

    def tell_damage(self) -> None:
        """Take part in a `reduce` of the others; another bucket tells them."""
        dense_mean(self._zeros(), torch.bfloat16, self._group)

    def take_report(self) -> Report | None:
        """Whether the last `reduce` overflowed, once; None without a scale, as nobody asks."""
        if not self._fresh:
            return None
        self._fresh = False
        (overflowed,) = self._readback.wait()
        return unpacked_report(bool(overflowed))

    def take_back(self) -> None:
        """What was owed is again, as the step was not applied."""
        self._owed, self._sent = self._sent, None

    def states(self) -> dict[str, SegmentState]:
        """{name: what its parameter must carry to go on elsewhere}."""
        owed = self._zeros() if self._owed is None else self._owed
        parts = owed.cpu().split(self.plan.sizes)
        return {
            name: {"residual": part.clone()}
            for name, part in zip(self.plan.names, parts, strict=True)
        }

    def parameter_stats(self) -> dict[str, dict[str, float]]:
        """Empty: no threshold, and nothing kept back."""
        return {}

    def silent(self) -> list[str]:
        """None: everything is sent."""
        return []

    def _zeros(self) -> Tensor:
        return torch.zeros(self.plan.numel, device=self._device)
