"""What will be sent: arithmetic on parameter sizes, no tensors."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import torch

from dct_kernels import payload_layout

from .. import wire
from ..compressor import HEADROOM, default_capacity
from .transports import Gather

WHOLE_BELOW = 256


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user chose, for every bucket alike."""

    density: float
    refresh_every: int
    policy: str
    value_dtype: torch.dtype
    transport: type[Gather]

    def is_whole(self, numel: int) -> bool:
        """Whether everything is sent of a parameter of this size: below 256 elements.

        Biases and norms are a hundredth of the elements and would send a handful of entries each.
        They travel in the payload with the others, all of them, as a collective of their own costs
        more than their positions do. At density 1 all parameters are alike.
        """
        return numel < WHOLE_BELOW and self.density < 1


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """What one bucket sends per step, by its parameters' names and sizes in the bucket's order."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    settings: Settings

    @cached_property
    def bounds(self) -> list[int]:
        """Offsets of the parameters in the bucket: one more than there are parameters."""
        bounds = [0]
        for size in self.sizes:
            bounds.append(bounds[-1] + size)
        return bounds

    @cached_property
    def whole(self) -> frozenset[int]:
        """Indices of the parameters of which everything is sent."""
        return frozenset(i for i, size in enumerate(self.sizes) if self.settings.is_whole(size))

    @cached_property
    def whole_numel(self) -> int:
        return sum(self.sizes[index] for index in self.whole)

    @cached_property
    def compressed_numel(self) -> int:
        return self.bounds[-1] - self.whole_numel

    @cached_property
    def capacity(self) -> int:
        """Entries of room in the bucket's payload."""
        return default_capacity(self.compressed_numel, self.settings.density, self.whole_numel)

    @cached_property
    def payload_bytes(self) -> int:
        """Of one rank's payload."""
        return payload_layout(self.bounds[-1], self.capacity, self.settings.value_dtype).nbytes

    def wire_bytes(self, world_size: int) -> int:
        """Bytes a rank sends for this bucket in a step."""
        return self.settings.transport.wire_bytes(self.payload_bytes, world_size)


def step_bytes(plans: Sequence[BucketPlan], world_size: int) -> int:
    """Bytes a rank sends in a compressed step."""
    return sum(plan.wire_bytes(world_size) for plan in plans)


def plan_table(plans: Sequence[BucketPlan], world_size: int, transport_reason: str) -> str:
    """The plan as text, one line per parameter; bytes are what this rank sends in a step."""
    settings = plans[0].settings
    dtype = str(settings.value_dtype).removeprefix("torch.")
    heading = (
        f"DCT: density {settings.density}, {dtype} values, ranks: {world_size}, "
        f"buckets: {len(plans)}, transport: {settings.transport.name} ({transport_reason})"
    )
    itemsize = settings.value_dtype.itemsize
    rows = [("parameter", "numel", "sent as", "capacity", "bytes/step")]
    entries_bytes = 0
    for plan in plans:
        for index, (name, size) in enumerate(zip(plan.names, plan.sizes, strict=True)):
            whole = index in plan.whole
            capacity = size if whole else default_capacity(size, settings.density)
            nbytes = settings.transport.wire_bytes(capacity * (2 + itemsize), world_size)
            sent_as = "whole" if whole else "DCT"
            rows.append((name, f"{size:,}", sent_as, f"{capacity:,}", f"{nbytes:,}"))
            entries_bytes += nbytes
    total = step_bytes(plans, world_size)
    numel = sum(plan.bounds[-1] for plan in plans)
    rows.append(("headers, rounding", "", "", "", f"{total - entries_bytes:,}"))
    rows.append(("total", f"{numel:,}", "", "", f"{total:,}"))
    dense = wire.all_reduce_bytes(4 * numel, world_size)
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
