"""How the payloads of all ranks become their mean on every rank. Knows no DDP."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from dct_kernels import checks
from dct_kernels.layout import (
    FLAG_DAMAGE,
    FLAG_NON_FINITE,
    FLAG_OVERFLOW,
    HEADER,
    HEADER_BYTES,
)

from .. import wire
from ..collectives import all_gather
from ..compressor import Compressor


class Receipt(NamedTuple):
    """What a rank knows of an exchange that is over; lists have an item per rank.

    What was damaged says nothing: its flags and count are 0.
    """

    status: list[int]  # of what this rank received from each: 0, or bits of `scatter_unpack`
    flags: list[int]  # that each rank set in what it sent
    counts: list[int]  # entries that each rank sent to this one

    @property
    def damaged(self) -> dict[int, int]:
        """{rank: status} of what this rank received, and could not use."""
        return {rank: status for rank, status in enumerate(self.status) if status}

    @property
    def told(self) -> list[int]:
        """Ranks that received damage in the exchange before, as they say in this one."""
        return [rank for rank, flags in enumerate(self.flags) if flags & FLAG_DAMAGE]

    @property
    def non_finite(self) -> bool:
        """Whether some rank saw a NaN or Inf in its gradient."""
        return any(flags & FLAG_NON_FINITE for flags in self.flags)

    @property
    def overflowed(self) -> int:
        """How many ranks had no room for all that passed."""
        return sum(bool(flags & FLAG_OVERFLOW) for flags in self.flags)


class Gather:
    """One all-gather of the payload; every rank sums all of them, in rank order.

    Each rank sends its payload P - 1 times, so bytes grow with P: it pays while the density is well
    below 1 / P.

    A transport has `name`, `wire_bytes`, and these three: `reduce`, whose notes the caller brings
    to the host, `receipt`, which reads them there, and `tell_damage`. Nothing else knows how many
    payloads there are, nor what is in them.
    """

    name = "gather"

    def __init__(self, compressor: Compressor, group: dist.ProcessGroup) -> None:
        self._compressor = compressor
        self._group = group
        shape = (group.size(), compressor.payload.numel())
        self._payloads = compressor.payload.new_zeros(shape)
        words = self._payloads.view(torch.int32)
        self._headers = [row[: HEADER_BYTES // 4] for row in words]

    @staticmethod
    def wire_bytes(payload_bytes: int, world_size: int) -> int:
        """Bytes this rank sends in a step."""
        return wire.all_gather_bytes(payload_bytes, world_size)

    def reduce(
        self, payload: Tensor, out: Tensor, out_scale: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Write the mean of every rank's payload into `out`.

        Returns:
            Notes for `receipt`: int32 tensors on the device, to be copied before the next call.
        """
        with record_function("dct::exchange"):
            all_gather(self._payloads, payload, self._group)
        with record_function("dct::unpack"):
            status = self._compressor.unpack(self._payloads, out, out_scale)
        return status, *self._headers

    @staticmethod
    def receipt(notes: Sequence[Tensor]) -> Receipt:
        """The notes of a `reduce`, on the host, as numbers."""
        status, *headers = notes
        receipt = Receipt(status.tolist(), [], [])
        fields = HEADER.iter_unpack(bytes(torch.cat(headers).view(torch.uint8).tolist()))
        for code, (_, _, _, flags, _, _, count, _) in zip(receipt.status, fields, strict=True):
            receipt.flags.append(0 if code else flags)
            receipt.counts.append(0 if code else count)
        return receipt

    def tell_damage(self) -> None:
        """Take part in an exchange with no more than the word that what came last was damaged."""
        with record_function("dct::exchange"):
            all_gather(self._payloads, self._compressor.pack_damage(), self._group)


TRANSPORTS = {Gather.name: Gather}


def resolve_transport(transport: str) -> type[Gather]:
    """The class behind a transport's name; "auto" is gather, the only one in this version."""
    if transport == "shard":
        got = "'shard', which is not available in this version"
        checks.fail("DCTState", "transport", "'auto' or 'gather'", got)
    if transport not in ("auto", *TRANSPORTS):
        checks.fail("DCTState", "transport", "'auto' or 'gather'", repr(transport))
    return TRANSPORTS.get(transport, Gather)
