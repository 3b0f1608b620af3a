"""How the payloads of all ranks become their mean on every rank: what transports have in common.

Knows no DDP. One transport a file: `gather` and `shard`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels.layout import (
    FLAG_DAMAGE,
    FLAG_NON_FINITE,
    FLAG_OVERFLOW,
    HEADER,
    HEADER_BYTES,
)

from ..compressor import Compressor
from .bucket_plan import BucketPlan
from .checkpoint import OWED, SegmentState
from .link import Link

_FLAGS_WORD, _FLAGS_SHIFT = 1, 24  # byte 7 of a header, in little-endian int32


class Header(NamedTuple):
    """What the header of a payload says."""

    flags: int
    count: int  # type: ignore[assignment]  # in place of tuple.count

    @property
    def overflow(self) -> bool:
        return bool(self.flags & FLAG_OVERFLOW)

    @property
    def non_finite(self) -> bool:
        return bool(self.flags & FLAG_NON_FINITE)

    @property
    def damage(self) -> bool:
        return bool(self.flags & FLAG_DAMAGE)


class Receipt(NamedTuple):
    """What a rank knows of an exchange that is over."""

    damaged: list[str]  # what it received and could not use
    told: list[int]  # ranks that received damage in this exchange or the one before, as they say
    non_finite: bool  # whether some rank saw a NaN or Inf in its gradient: the same on every rank
    counts: list[int]  # entries that this rank packed, of each range
    overflowed: int  # how many payloads had no room for all that passed,
    payloads: int  # of how many


class Transport(ABC):
    """How one bucket's payloads become their mean.

    `reduce` leaves notes, which the caller brings to the host, and `receipt` reads them there.
    Nothing else knows how many payloads there are, nor what is in them.

    Args:
        plan: of the bucket.
        compressor: packs the payload and unpacks the mean.
        group: the ranks to average over.
        step: compressed steps taken so far.
    """

    name: str

    @staticmethod
    @abstractmethod
    def ranges(ranks: int) -> int:
        """How many payloads a rank packs, each of an equal range of the bucket."""

    @staticmethod
    @abstractmethod
    def wire_bytes(plan: BucketPlan) -> int:
        """Bytes that the rank which sends most sends in a step."""

    @staticmethod
    @abstractmethod
    def seconds(plan: BucketPlan, link: Link) -> float:
        """What an exchange takes on this link, packing and unpacking included."""

    def __init__(
        self, plan: BucketPlan, compressor: Compressor, group: dist.ProcessGroup, step: int
    ) -> None:
        self._compressor = compressor
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)  # as errors call them
        self._senders = torch.tensor(self._ranks, device=compressor.payload.device)

    @abstractmethod
    def reduce(self, out: Tensor, out_scale: Tensor | None = None) -> Sequence[Tensor]:
        """Write the mean of the payloads that all ranks' compressors hold into `out`.

        Returns:
            Notes for `receipt`: int32 tensors on the device, to be copied before the next call.
        """

    @abstractmethod
    def receipt(self, notes: Sequence[Tensor]) -> Receipt:
        """What the notes of the last `reduce`, on the host, say."""

    @abstractmethod
    def alarms(self, notes: Sequence[Tensor]) -> Tensor:
        """What a receipt of these notes will hold, int32 [3] on the device: see `alarms_of`."""

    @abstractmethod
    def tell_damage(self) -> None:
        """Take part in an exchange with no more than the word that what came last was damaged."""

    def take_back(self) -> None:
        """Undo what the last `reduce` did to residuals, for a step that was not applied."""
        self._compressor.take_back()

    def segment_state(self, index: int) -> SegmentState:
        """Copies, on the CPU, of what it keeps for one parameter beside the compressor's."""
        return {}

    def load_segment(self, index: int, state: SegmentState) -> Tensor | None:
        """Go on from a `segment_state`, of this transport or another.

        Returns:
            What the state owes to the mean of this parameter and this rank cannot keep, or None.
        """
        return state.get(OWED)


def compressor_of(
    plan: BucketPlan, segments: Sequence[int], step: int, device: torch.device, ranges: int = 1
) -> Compressor:
    """By the plan's settings and capacity; compressed steps go on at `step`."""
    compressor = Compressor(
        segments[-1],
        segments,
        plan.settings.density,
        refresh_every=plan.settings.refresh_every,
        policy=plan.settings.policy,
        value_dtype=plan.settings.value_dtype,
        capacity=plan.capacity,
        ranges=ranges,
        device=device,
    )
    compressor.step = step
    return compressor


def headers(payload: Tensor) -> list[Tensor]:
    """Views of the header of every row of `payload` [..., nbytes], int32 [16] each."""
    return list(payload.view(torch.int32).view(-1, payload.shape[-1] // 4)[:, : HEADER_BYTES // 4])


def alarms_of(status: Tensor, words: Sequence[Tensor], intact: Tensor, senders: Tensor) -> Tensor:
    """Whether something was damaged; 1 + a rank that says it received damage, or 0; whether one saw
    a NaN or Inf. int32 [3].

    Args:
        status: int32, non-zero where something was damaged.
        words: from `headers`, a rank's each.
        intact: bool, of each header or of all: what was damaged says nothing.
        senders: int64, the ranks.
    """
    flags = (torch.stack(list(words))[:, _FLAGS_WORD] >> _FLAGS_SHIFT) * intact
    told = torch.where((flags & FLAG_DAMAGE) > 0, senders + 1, 0).max()
    return torch.stack([status.any(), told, (flags & FLAG_NON_FINITE).any()]).int()


def read_headers(words: Sequence[Tensor]) -> list[Header]:
    """Views that `headers` gave, on the host by now, as numbers."""
    fields = HEADER.iter_unpack(bytes(torch.cat(list(words)).view(torch.uint8).tolist()))
    return [Header(flags, count) for _, _, _, flags, _, _, count, _ in fields]
