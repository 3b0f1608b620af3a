"""Buckets. Each bucket packs a flat tensor, sends it, and unpacks the mean of all ranks."""

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import span
from .plan import BucketPlan
from .reduce_scatter import ReduceScatter
from .results import ExchangeResult
from .transport import AllGather, Transport


@dataclasses.dataclass(frozen=True)
class SegmentState:
    """The state of a parameter, or of a slice of a parameter.

    Attributes:
        residual: float32 [numel], entries that this rank has not sent yet.
        owner: float32 [numel], the residual of this rank as the owner of a range of the bucket, in
            units of the mean. It is 0 outside that range. None if the transport has no owners.
        base: float32 [numel], the base of a `DCTAverager`, else None.
    """

    residual: Tensor
    owner: Tensor | None = None
    base: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "SegmentState":
        """Return a state with `change` applied to each tensor."""
        found = {key: value for key, value in vars(self).items() if value is not None}
        return SegmentState(**{key: change(value) for key, value in found.items()})

    def share(self, ranks: int) -> Tensor:
        """The pending entries, as this rank's contribution to the sum over `ranks` ranks."""
        return self.residual if self.owner is None else self.residual + ranks * self.owner


def parameter_stats(buckets: Iterable["Bucket"]) -> dict[str, dict[str, float]]:
    """Return {parameter: figures of the last step}; see `DCTState.parameter_stats`."""
    return dict(chain.from_iterable(bucket.parameter_stats().items() for bucket in buckets))


class Bucket:
    """The codec and the transport of one bucket.

    Args:
        plan: names and sizes, in the bucket's order.
        group: the ranks to average over.
        device: the device of the gradients.
        step: number of compressed steps so far.
        states: {name: state} to start from. Missing names start at 0.

    Attributes:
        transports: {name: class}. Simulations override it.
        words: see `Exchange`. The next exchange overwrites the tensors.
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
        self.transport = self.transports[plan.transport](plan, self.codec, group)
        for index, name in enumerate(plan.names):
            if name in states:
                self._load(index, states[name])
        self.words: Sequence[Tensor] = ()
        self._packed = False  # whether the current exchange has packed its entries
        self._first_step = step

    def reduce(
        self, buffer: Tensor, scale: Tensor | None = None, inv_scale: Tensor | None = None
    ) -> None:
        """Replace this rank's gradients in `buffer` by their mean over the group.

        Args:
            buffer: float32, bfloat16 or float16 [numel], in units of `scale`.
            scale, inv_scale: a GradScaler's scale and its inverse, or None.
        """
        self.start(buffer, inv_scale)
        self.finish(buffer, scale)

    def start(self, buffer: Tensor, inv_scale: Tensor | None = None) -> None:
        """Pack `buffer` and start to send the payload. `buffer` may be overwritten afterwards.

        Call `finish` before the next `start`, because all exchanges use the same payload memory.
        Other buckets may be started before `finish` if the transport sends once.
        """
        self.begin()
        with span("dct::pack"):
            self.codec.pack(buffer, inv_scale)
        self._packed = True
        self.transport.start()

    def begin(self) -> None:
        """Begin an exchange. If the exchange fails before it packs, `take_back` does nothing."""
        self.words, self._packed = (), False

    def finish(self, out: Tensor, scale: Tensor | None = None) -> None:
        """Write the mean of all ranks' payloads into `out`."""
        self.words = self.transport.finish(out, scale)

    def result(self, words: Sequence[Sequence[int]]) -> ExchangeResult:
        return self.transport.result(words)

    def take_back(self) -> None:
        if self._packed:
            self.transport.take_back()

    def residuals(self) -> list[Tensor]:
        """This rank's residual and the owner's residual, which may be empty."""
        return [self.codec.residual, self.transport.owned[1]]

    def add_pending(self, total: Tensor) -> None:
        """Add this rank's pending entries to `total` [numel], in units of the sum."""
        total += self.codec.residual
        low, residual = self.transport.owned
        total[low : low + len(residual)] += self.plan.ranks * residual

    def merge_owned(self) -> None:
        """Move the owner's residual into this rank's residual."""
        low, residual = self.transport.owned
        self.codec.residual[low : low + len(residual)] += self.plan.ranks * residual
        residual.zero_()

    def drop(self, where: Tensor) -> None:
        """Set the residuals to 0 where `where`, bool [numel], is true."""
        self.codec.residual.masked_fill_(where, 0)
        low, residual = self.transport.owned
        residual.masked_fill_(where[low : low + len(residual)], 0)

    def drop_range(self, low: int, high: int) -> None:
        """Set the residuals of the entries [low, high) of the bucket to 0."""
        self.codec.residual[low:high] = 0
        first, residual = self.transport.owned
        residual[max(low - first, 0) : max(high - first, 0)] = 0

    def states(self) -> dict[str, SegmentState]:
        """{name: a copy of the parameter's state on the CPU}."""
        residuals = self.codec.residual.split(self.plan.sizes)
        return {
            name: SegmentState(residual.to("cpu", copy=True), self.transport.owner_state(index))
            for index, (name, residual) in enumerate(zip(self.plan.names, residuals, strict=True))
        }

    def _load(self, index: int, state: SegmentState) -> None:
        residual = self.codec.residual.split(self.plan.sizes)[index]
        residual.copy_(state.residual)
        if state.owner is not None:
            rest = self.transport.load_owner(index, state.owner)
            # Each rank contributes 1 / P of its residual to the mean.
            residual += (self.plan.ranks * rest).to(residual.device)

    def parameter_stats(self) -> dict[str, dict[str, float]]:
        """{name: figures of the last `reduce`}; see `DCTState.parameter_stats`."""
        if self.codec.step == self._first_step or not self.plan.names:
            return {}
        sizes, ends = self.plan.sizes, self.plan.range_bounds[1:-1]
        ranges = [bisect_right(ends, low) for low in self.plan.bounds[:-1]]
        sent = torch.empty_like(self.codec.residual)
        self.codec.unpack(self.codec.payload.unsqueeze(0), sent)
        counts = [part.count_nonzero().float() / max(part.numel(), 1) for part in sent.split(sizes)]
        norms = torch._foreach_norm(self.codec.residual.split(sizes))
        thresholds = self.codec.threshold.tolist()
        columns = {
            "density": torch.stack(counts).tolist(),
            "threshold": [thresholds[index] for index in ranges],
            "residual_norm": torch.stack(norms).tolist(),
        }
        rows = zip(*columns.values(), strict=True)
        return {
            name: dict(zip(columns, row, strict=True))
            for name, row in zip(self.plan.names, rows, strict=True)
        }
