"""Computes the sizes of buckets, payloads and messages from parameter sizes, without tensors."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dct_kernels import backend_of
from dct_kernels.layout import BLOCK, range_bounds

from ..collectives import all_gather_bytes, all_reduce_bytes
from ..compressor import HEADROOM
from ..formats import DTYPES
from ..groups import digest
from ..user_warnings import logger
from .settings import TRANSPORTS, Settings


class Slice(NamedTuple):
    """The entries of a parameter that lie in a range or part, as offsets in the parameter."""

    index: int  # type: ignore[assignment]  # overrides tuple.index
    low: int
    high: int


def slices(sizes: Sequence[int], start: int, end: int) -> Iterator[Slice]:
    """Yield the range [start, end) of a bucket as slices of the parameters with these sizes."""
    for index, (low, high) in enumerate(pairwise([0, *accumulate(sizes)])):
        if max(low, start) < min(high, end):
            yield Slice(index, max(low, start) - low, min(high, end) - low)


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """The sizes of the messages of one bucket in a step.

    Attributes:
        names, sizes: the names and sizes of the bucket's parameters, in order.
        transport: "all_gather" or "reduce_scatter".
        ranks: the number of ranks.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    settings: Settings
    transport: str
    ranks: int

    @property
    def label(self) -> str:
        """The names of the first and the last parameter."""
        return " ... ".join(dict.fromkeys([*self.names[:1], *self.names[-1:]]))

    @cached_property
    def bounds(self) -> list[int]:
        """The offsets of the parameters in the bucket, and the bucket's end."""
        return [0, *accumulate(self.sizes)]

    @cached_property
    def numel(self) -> int:
        return self.bounds[-1]

    @cached_property
    def ranges(self) -> int:
        """The number of payloads per rank, each for an equal range of whole blocks."""
        return self.ranks if self.transport == "reduce_scatter" else 1

    @cached_property
    def range_bounds(self) -> list[int]:
        """The offsets of the ranges in the bucket, and the bucket's end."""
        return [0, *(range_bounds(self.numel, self.ranges, r)[1] for r in range(self.ranges))]

    @cached_property
    def owners(self) -> int:
        """The number of ranges that are not empty. In a small bucket, the last ranges are empty."""
        return sum(low < high for low, high in pairwise(self.range_bounds))

    @cached_property
    def capacity(self) -> int:
        """The capacity of each range's payload. The first range is the longest."""
        return self.settings.capacity(self.range_bounds[1])

    @cached_property
    def payload_bytes(self) -> int:
        """The size of one range's payload."""
        return self.settings.payload_bytes(self.numel, self.ranges, self.range_bounds[1])

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes per step for this bucket, of the rank that sends the most."""
        gathered = all_gather_bytes(self.payload_bytes, self.ranks)
        if self.transport == "all_gather":
            return gathered
        # Before the all-gather, each rank sends a payload to every other owner. A rank that owns no
        # range sends the most payloads.
        return min(self.owners, self.ranks - 1) * self.payload_bytes + gathered


def step_bytes(plans: Sequence[BucketPlan]) -> int:
    """Bytes per compressed step of the rank that sends the most."""
    return sum(plan.wire_bytes for plan in plans)


def plan_table(plans: Sequence[BucketPlan], device: torch.device, each: str = "step") -> str:
    """The plan as text, one line per bucket. Bytes are per rank and step, or per `each`."""
    settings, ranks = plans[0].settings, plans[0].ranks
    transports = ", ".join(dict.fromkeys(plan.transport for plan in plans))
    total, numel = step_bytes(plans), sum(plan.numel for plan in plans)
    dense = all_reduce_bytes(4 * numel, ranks)
    rows = [["bucket", "parameters", "numel", "capacity", f"bytes/{each}"]]
    for index, plan in enumerate(plans):
        by = f", {plan.transport}" if "," in transports else ""
        numbers = len(plan.names), plan.numel, plan.owners * plan.capacity, plan.wire_bytes
        rows.append([f"{index}: {plan.label}{by}", *(f"{number:,}" for number in numbers)])
    parameters = sum(len(plan.names) for plan in plans)
    rows.append(["total", f"{parameters:,}", f"{numel:,}", "", f"{total:,}"])
    rows.append(["float32 ring all-reduce", "", "", "", f"{dense:,}"])
    lines = [
        f"DCT: density {settings.density}, {settings.format} values, ranks: {ranks}, "
        f"buckets: {len(plans)}, transport: {transports} ({transport_reason(plans)}), "
        f"backend: {backend_of(device)}"
    ]
    lines += aligned(rows)
    if total:
        lines.append(f"That is {dense / total:.1f}x fewer bytes than the all-reduce.")
    if settings.density < 1:
        lines.append(f"Capacity is {HEADROOM} x density x numel. It fixes the bytes of every step.")
    elif settings.format in DTYPES:
        lines.append(
            f"All entries are sent in {settings.format}, as many bytes as a plain all-reduce in "
            f"{settings.format}."
        )
    return "\n".join(lines)


# By default, up to GATHER_RANKS ranks all-gather sparse payloads. More ranks reduce-scatter buckets
# with at least LEAST_BLOCKS blocks per rank. For smaller buckets, a second collective does not pay
# off. For dense payloads, the default is the transport that sends fewer bytes.
GATHER_RANKS, LEAST_BLOCKS = 8, 4


def plan_bucket(
    names: Sequence[str],
    sizes: Sequence[int],
    settings: Settings,
    ranks: int,
    numel: int | None = None,
) -> BucketPlan:
    """Plan a bucket that `ranks` ranks exchange.

    Args:
        numel: the number of elements that determines the transport, if ranks have buckets of
            different sizes; default: the sum of sizes.
    """
    transport = transport_for(settings, sum(sizes) if numel is None else numel, ranks)
    return BucketPlan(tuple(names), tuple(sizes), settings, transport, ranks)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format the rows of a table as lines, with names on the left and right-aligned cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
        for name, *cells in rows
    ]


def transport_for(settings: Settings, numel: int, ranks: int) -> str:
    """Choose the transport of a bucket of `numel` elements that `ranks` ranks exchange."""
    if settings.transport is not None:
        return settings.transport
    if settings.every_entry:
        plans = [BucketPlan(("",), (numel,), settings, name, ranks) for name in TRANSPORTS]
        return min(plans, key=lambda plan: plan.wire_bytes).transport  # the first one if equal
    gathers = ranks <= GATHER_RANKS or numel < _least_numel(ranks)
    return "all_gather" if gathers else "reduce_scatter"


def keeps_owners(settings: Settings, ranks: int) -> bool:
    """Whether buckets may have owners, so that a state contains owners' residuals."""
    return transport_for(settings, _least_numel(ranks), ranks) == "reduce_scatter"


def transport_reason(plans: Sequence[BucketPlan]) -> str:
    """The reason for the transports of these plans."""
    settings, ranks = plans[0].settings, plans[0].ranks
    if settings.transport is not None:
        return "as asked"
    if settings.every_entry:
        return "fewer bytes"
    if ranks <= GATHER_RANKS:
        return f"up to {GATHER_RANKS} ranks"
    why = f"more than {GATHER_RANKS} ranks"
    if any(plan.transport == "all_gather" for plan in plans):
        least = f"{_least_numel(ranks):,} elements, {LEAST_BLOCKS} blocks per rank"
        why += f"; all_gather below {least}"
    return why


def log_plan(op: str, plan: BucketPlan, device: torch.device) -> None:
    """Log the transport and the backend of a new bucket."""
    how = f"{plan.transport} ({transport_reason([plan])}), backend {backend_of(device)}"
    logger.info("%s: bucket %s of %s elements: %s", op, plan.label, f"{plan.numel:,}", how)


def _least_numel(ranks: int) -> int:
    """The number of elements of the smallest bucket that uses a reduce-scatter by default."""
    return LEAST_BLOCKS * ranks * BLOCK


_AnyTensor = TypeVar("_AnyTensor", bound=Tensor)

# Components of parameter names that torch.compile and checkpoint_wrapper insert.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def unwrapped(name: str) -> str:
    """The name of a parameter in the model without wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def describe(names: Mapping[_AnyTensor, str]) -> str:
    """Summarize names, shapes and dtypes in one line, which must be the same on every rank."""
    lines = [f"{name} {p.dtype} {tuple(p.shape)}" for p, name in names.items()]
    numel = sum(parameter.numel() for parameter in names)
    return f"{len(names)} parameters of {numel:,} elements, names and shapes {digest(lines)}"
