"""Sizes of buckets, payloads and messages: arithmetic on parameter sizes, no tensors."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch

from dct_kernels import backend_of
from dct_kernels.layout import range_bounds

from .. import wire
from ..compressor import HEADROOM
from .codec import Settings


class Slice(NamedTuple):
    """The part of a parameter that lies in a range; offsets are in the parameter."""

    index: int  # type: ignore[assignment]  # in place of tuple.index
    low: int
    high: int


def slices(sizes: Sequence[int], start: int, end: int) -> Iterator[Slice]:
    """The range [start, end) of a bucket, as slices of parameters of these sizes, in order."""
    for index, (low, high) in enumerate(pairwise([0, *accumulate(sizes)])):
        if max(low, start) < min(high, end):
            yield Slice(index, max(low, start) - low, min(high, end) - low)


class TransportFormulas(Protocol):
    """The part of a transport that a plan uses."""

    name: str

    @staticmethod
    def ranges(ranks: int) -> int:
        """Payloads per rank, each of an equal range."""

    @staticmethod
    def wire_bytes(plan: "BucketPlan") -> int:
        """Bytes per step of the rank that sends most."""


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """The messages of one bucket per step, by its parameters' names and sizes in order.

    Attributes:
        transport: sends payloads to the other ranks.
        ranks: their number.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    settings: Settings
    transport: type[TransportFormulas]
    ranks: int

    @cached_property
    def bounds(self) -> list[int]:
        """Offsets of the parameters in the bucket: one more than there are parameters."""
        return [0, *accumulate(self.sizes)]

    @cached_property
    def numel(self) -> int:
        return self.bounds[-1]

    @cached_property
    def ranges(self) -> int:
        """Payloads per rank, each of an equal range of whole blocks."""
        return self.transport.ranges(self.ranks)

    @cached_property
    def range_bounds(self) -> list[int]:
        """Offsets of the ranges in the bucket: one more than there are ranges."""
        return [0, *(range_bounds(self.numel, self.ranges, r)[1] for r in range(self.ranges))]

    @cached_property
    def owners(self) -> int:
        """Ranges that are not empty: the first ones. A bucket of few blocks has no more of them."""
        return sum(low < high for low, high in pairwise(self.range_bounds))

    @cached_property
    def capacity(self) -> int:
        """Entries of room in the payload of each range, by the longest one, which is the first."""
        return self.settings.capacity(self.range_bounds[1])

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of the payload of one range."""
        return self.settings.payload_bytes(self.numel, self.ranges, self.range_bounds[1])

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes per step for this bucket, of the rank that sends most."""
        return self.transport.wire_bytes(self)

    def slices(self, index: int) -> Iterator[Slice]:
        """Range `index` as slices of parameters, in the bucket's order."""
        yield from slices(self.sizes, *self.range_bounds[index : index + 2])


def step_bytes(plans: Sequence[BucketPlan]) -> int:
    """Bytes per compressed step, of the rank that sends most."""
    return sum(plan.wire_bytes for plan in plans)


def plan_table(
    plans: Sequence[BucketPlan], transport_reason: str, device: torch.device, each: str = "step"
) -> str:
    """The plan as text, one line per bucket; bytes are sent per rank and step, or `each`."""
    settings, ranks = plans[0].settings, plans[0].ranks
    dtype = str(settings.value_dtype).removeprefix("torch.")
    transports = list(dict.fromkeys(plan.transport.name for plan in plans))
    heading = (
        f"DCT: density {settings.density}, {dtype} values, ranks: {ranks}, "
        f"buckets: {len(plans)}, transport: {', '.join(transports)} ({transport_reason}), "
        f"backend: {backend_of(device)}"
    )
    rows: list[tuple[str, ...]] = [("bucket", "parameters", "numel", "capacity", f"bytes/{each}")]
    for index, plan in enumerate(plans):
        numbers = len(plan.names), plan.numel, plan.owners * plan.capacity, plan.wire_bytes
        by = f", {plan.transport.name}" if len(transports) > 1 else ""
        rows.append((_label(index, plan) + by, *(f"{number:,}" for number in numbers)))
    total = step_bytes(plans)
    numel = sum(plan.numel for plan in plans)
    parameters = f"{sum(len(plan.names) for plan in plans):,}"
    rows.append(("total", parameters, f"{numel:,}", "", f"{total:,}"))
    dense = wire.all_reduce_bytes(4 * numel, ranks)
    rows.append(("float32 ring all-reduce", "", "", "", f"{dense:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [heading]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    if total:
        lines.append(f"That is {dense / total:.1f}x fewer bytes than the all-reduce.")
    if settings.density < 1:
        lines.append(
            f"Capacity is {HEADROOM} x density x numel. It sets the bytes, whatever passes."
        )
    return "\n".join(lines)


def _label(index: int, plan: BucketPlan) -> str:
    ends = dict.fromkeys([*plan.names[:1], *plan.names[-1:]])
    return f"{index}: {' ... '.join(ends)}"
