"""What will be sent: arithmetic on parameter sizes, no tensors."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch

from dct_kernels import backend_of, payload_layout
from dct_kernels.layout import BLOCK, range_blocks, range_bounds

from .. import wire
from ..compressor import HEADROOM, default_capacity

WHOLE_BELOW = 256


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user chose, for every bucket alike."""

    density: float
    refresh_every: int
    policy: str
    value_dtype: torch.dtype

    def as_told(self) -> dict[str, str | float]:
        """What JSON can hold of them, for ranks to compare."""
        told = {k: str(v).removeprefix("torch.") for k, v in dataclasses.asdict(self).items()}
        return told | {"density": float(self.density)}

    def is_whole(self, numel: int) -> bool:
        """Whether everything is sent of a parameter of this size: below 256 elements.

        Biases and norms are a hundredth of the elements and would send a handful of entries each.
        They travel in the payload with the others, all of them, as a collective of their own costs
        more than their positions do. At density 1 all parameters are alike.
        """
        return numel < WHOLE_BELOW and self.density < 1


class Slice(NamedTuple):
    """The part of a parameter that lies in a range; offsets are in the parameter."""

    index: int  # type: ignore[assignment]  # in place of tuple.index
    low: int
    high: int


def slices(sizes: Sequence[int], start: int, end: int) -> Iterator[Slice]:
    """What the range [start, end) of a bucket holds of parameters of these sizes, in order."""
    for index, (low, high) in enumerate(pairwise([0, *accumulate(sizes)])):
        if max(low, start) < min(high, end):
            yield Slice(index, max(low, start) - low, min(high, end) - low)


class TransportFormulas(Protocol):
    """What a plan asks of a transport."""

    name: str

    @staticmethod
    def ranges(ranks: int) -> int:
        """How many payloads a rank packs, each of an equal range; 0 if nothing is compressed."""

    @staticmethod
    def wire_bytes(plan: "BucketPlan") -> int:
        """Bytes that the rank which sends most sends in a step."""


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """What one bucket sends per step, by its parameters' names and sizes in the bucket's order.

    Attributes:
        transport: how payloads get to the other ranks.
        ranks: that take part.
        parameter_sizes: of all of each parameter, where the bucket holds a part of some; else
            `sizes`. They decide what is sent whole.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    settings: Settings
    transport: type[TransportFormulas]
    ranks: int
    parameter_sizes: tuple[int, ...] | None = None

    @cached_property
    def bounds(self) -> list[int]:
        """Offsets of the parameters in the bucket: one more than there are parameters."""
        return [0, *accumulate(self.sizes)]

    @cached_property
    def whole(self) -> frozenset[int]:
        """Indices of the parameters of which everything is sent."""
        sizes = self.sizes if self.parameter_sizes is None else self.parameter_sizes
        return frozenset(i for i, size in enumerate(sizes) if self.settings.is_whole(size))

    @cached_property
    def whole_numel(self) -> int:
        return sum(self.sizes[index] for index in self.whole)

    @cached_property
    def compressed_numel(self) -> int:
        return self.bounds[-1] - self.whole_numel

    @cached_property
    def ranges(self) -> int:
        """How many payloads a rank packs, each of an equal range of whole blocks; 0 if none."""
        return self.transport.ranges(self.ranks)

    @cached_property
    def owners(self) -> int:
        """Ranges that are not empty: the first ones. A bucket of few blocks has no more of them."""
        return -(-self.bounds[-1] // self._range_length) if self.bounds[-1] else 0

    @cached_property
    def capacity(self) -> int:
        """Entries of room in the payload of each range: as many as the fullest needs."""
        whole: Counter[int] = Counter()
        for index in self.whole:
            low, high = self.bounds[index], self.bounds[index + 1]
            for r in range(low // self._range_length, -(-high // self._range_length)):
                start, end = range_bounds(self.bounds[-1], self.ranges, r)
                whole[r] += min(high, end) - max(low, start)
        rooms = []
        for r in range(max(1, self.owners)):
            low, high = range_bounds(self.bounds[-1], self.ranges, r)
            compressed = high - low - whole[r]
            rooms.append(default_capacity(compressed, self.settings.density, whole[r]))
        return max(rooms)

    @cached_property
    def payload_bytes(self) -> int:
        """Of the payload of one range."""
        numel, dtype = self.bounds[-1], self.settings.value_dtype
        return payload_layout(numel, self.capacity, dtype, self.ranges).nbytes

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes that the rank which sends most sends for this bucket in a step."""
        return self.transport.wire_bytes(self)

    def slices(self, index: int) -> Iterator[Slice]:
        """What range `index` holds of each parameter, in the bucket's order."""
        yield from slices(self.sizes, *range_bounds(self.bounds[-1], self.ranges, index))

    @cached_property
    def _range_length(self) -> int:
        return max(1, range_blocks(self.bounds[-1], self.ranges)) * BLOCK


def step_bytes(plans: Sequence[BucketPlan]) -> int:
    """Bytes that the rank which sends most sends in a compressed step."""
    return sum(plan.wire_bytes for plan in plans)


def plan_table(plans: Sequence[BucketPlan], transport_reason: str, device: torch.device) -> str:
    """The plan as text, one line per parameter; bytes are what a rank sends in a step."""
    settings, ranks = plans[0].settings, plans[0].ranks
    dtype = str(settings.value_dtype).removeprefix("torch.")
    transports = ", ".join(dict.fromkeys(plan.transport.name for plan in plans))
    heading = (
        f"DCT: density {settings.density}, {dtype} values, ranks: {ranks}, "
        f"buckets: {len(plans)}, transport: {transports} ({transport_reason}), "
        f"backend: {backend_of(device)}"
    )
    entry_bytes = 2 + settings.value_dtype.itemsize
    rows = [("parameter", "numel", "sent as", "capacity", "bytes/step")]
    entries_bytes = 0
    for plan in plans:
        for index, (name, size) in enumerate(zip(plan.names, plan.sizes, strict=True)):
            whole = index in plan.whole
            if plan.ranges:
                capacity = size if whole else default_capacity(size, settings.density)
                packed = plan.ranges * plan.payload_bytes
                nbytes = capacity * entry_bytes * plan.wire_bytes // packed
                sent_as, room = "whole" if whole else "DCT", f"{capacity:,}"
            else:
                nbytes = plan.wire_bytes * size // max(plan.bounds[-1], 1)
                sent_as, room = plan.transport.name, ""
            rows.append((name, f"{size:,}", sent_as, room, f"{nbytes:,}"))
            entries_bytes += nbytes
    total = step_bytes(plans)
    numel = sum(plan.bounds[-1] for plan in plans)
    rows.append(("headers, rounding", "", "", "", f"{total - entries_bytes:,}"))
    rows.append(("total", f"{numel:,}", "", "", f"{total:,}"))
    dense = wire.all_reduce_bytes(4 * numel, ranks)
    rows.append(("float32 ring all-reduce", "", "", "", f"{dense:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [heading]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    if total:
        lines.append(f"That is {dense / total:.1f}x fewer bytes than the all-reduce.")
    lines.append(
        f"Capacity is {HEADROOM} x density x numel, shared by a bucket's parameters, and it"
    )
    lines.append("sets the bytes, whatever passes.")
    return "\n".join(lines)
