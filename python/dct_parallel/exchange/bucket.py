"""One bucket: a flat tensor packed, exchanged and unpacked in place."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from .plan import BucketPlan
from .reduce_scatter import ReduceScatter
from .results import ExchangeResult, Readback
from .transport import AllGather, Transport


@dataclasses.dataclass(frozen=True)
class SegmentState:
    """The state of a segment of a flat tensor, which is a parameter or a part of one.

    Attributes:
        residual: float32 [numel], entries that this rank has not sent yet.
        owner: entries that this rank has not sent as the owner of a range of the bucket, in units
            of the mean: as long as the segment, 0 outside of the range. None: it owns nothing here.
        base: the weights after the last averaging, of a DCTAverager; else None.
    """

    residual: Tensor
    owner: Tensor | None = None
    base: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "SegmentState":
        """A state with `change` applied to each tensor."""
        found = {key: value for key, value in vars(self).items() if value is not None}
        return SegmentState(**{key: change(value) for key, value in found.items()})

    def share(self, ranks: int) -> Tensor:
        """One rank's contribution, among `ranks`, to the sum of gradients that sends all of it."""
        return self.residual if self.owner is None else self.residual + ranks * self.owner


def parameter_stats(buckets: Iterable["Bucket"]) -> dict[str, dict[str, float]]:
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
    Attributes:
        transports: by name. A simulation has others.
    """

    transports: Mapping[str, type[Transport]] = {
        "all_gather": AllGather,
        "reduce_scatter": ReduceScatter,
    }

    def __init__(
        self,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        device: torch.device,
        step: int,
        states: dict[str, SegmentState],
    ) -> None:
        self.plan = plan
        self.codec = plan.settings.codec(plan.numel, plan.ranges, device, step)
        self._transport = self.transports[plan.transport](plan, self.codec, group)
        for index, name in enumerate(plan.names):
            if name in states:
                self._load(index, states[name])
        self._readback = Readback()
        self._raw_status: Sequence[Tensor] = ()  # of the last `reduce`
        self._fresh = False  # not read by `take_result` yet
        self._first_step = step

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

    def finish(self, out: Tensor, scale: Tensor | None = None) -> None:
        """Write the mean over the group of all ranks' payloads into `out`."""
        self._raw_status = self._transport.reduce(out, scale)
        with record_function("dct::read_back"):
            self._readback.post(*self._raw_status)
        self._fresh = True

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

    def keep_owed(self) -> None:
        """Move what this rank has not sent as an owner to its own residual."""
        if self._transport.owned is not None:
            low, residual = self._transport.owned
            self.codec.residual[low : low + len(residual)] += self.plan.ranks * residual
            residual.zero_()

    def drop(self, where: Tensor) -> None:
        """Lose what has not been sent of these entries, a bool [numel]."""
        self.codec.residual.masked_fill_(where, 0)
        if self._transport.owned is not None:
            low, residual = self._transport.owned
            residual.masked_fill_(where[low : low + len(residual)], 0)

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
        sizes, bounds = self.plan.sizes, torch.tensor(self.plan.bounds[:-1])
        ranges = torch.searchsorted(torch.tensor(self.plan.range_bounds[1:]), bounds, right=True)
        sent = torch.empty_like(self.codec.residual)
        self.codec.unpack(self.codec.payload.unsqueeze(0), sent)
        counts = [part.count_nonzero() / max(part.numel(), 1) for part in sent.split(sizes)]
        norms = torch._foreach_norm(self.codec.residual.split(sizes))
        columns = {
            "density": torch.stack(counts),
            "threshold": self.codec.threshold[ranges.clamp(max=self.plan.ranges - 1)],
            "residual_norm": torch.stack(norms),
        }
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        return {
            name: dict(zip(columns, row, strict=True))
            for name, row in zip(self.plan.names, rows, strict=True)
        }
