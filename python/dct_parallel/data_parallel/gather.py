"""Payloads to everybody: one all-gather."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from .. import wire
from ..collectives import all_gather
from ..compressor import Compressor
from .bucket_plan import BucketPlan
from .link import Link
from .transports import Header, Receipt, Transport, alarms_of, headers, read_headers


class Gather(Transport):
    """One all-gather of the payload; every rank sums all of them, in rank order.

    Each rank sends its payload P - 1 times, so bytes grow with P: it pays while the density is well
    below 1 / P.
    """

    name = "gather"

    def __init__(
        self, plan: BucketPlan, compressor: Compressor, group: dist.ProcessGroup, step: int
    ) -> None:
        super().__init__(plan, compressor, group, step)
        shape = (group.size(), compressor.payload.numel())
        self._payloads = compressor.payload.new_zeros(shape)
        self._headers = headers(self._payloads)

    @staticmethod
    def ranges(ranks: int) -> int:
        return 1

    @staticmethod
    def wire_bytes(plan: BucketPlan) -> int:
        return wire.all_gather_bytes(plan.payload_bytes, plan.ranks)

    @staticmethod
    def seconds(plan: BucketPlan, link: Link) -> float:
        sent = link.all_gather.seconds(plan.wire_bytes)
        return sent + plan.numel * (link.pack + link.unpack)

    def reduce(self, out: Tensor, out_scale: Tensor | None = None) -> Sequence[Tensor]:
        with record_function("dct::exchange"):
            all_gather(self._payloads, self._compressor.payload, self._group)
        with record_function("dct::unpack"):
            status = self._compressor.unpack(self._payloads, out, out_scale)
        return status, *self._headers

    def receipt(self, notes: Sequence[Tensor]) -> Receipt:
        status, *words = notes
        codes = status.tolist()
        # What was damaged says nothing.
        intact = [
            Header(0, 0) if code else header
            for code, header in zip(codes, read_headers(words), strict=True)
        ]
        return Receipt(
            damaged=[
                f"status {code} from rank {rank}"
                for rank, code in zip(self._ranks, codes, strict=True)
                if code
            ],
            told=[r for r, header in zip(self._ranks, intact, strict=True) if header.damage],
            non_finite=any(header.non_finite for header in intact),
            counts=[intact[self._group.rank()].count],
            overflowed=sum(header.overflow for header in intact),
            payloads=len(intact),
        )

    def alarms(self, notes: Sequence[Tensor]) -> Tensor:
        status, *words = notes
        return alarms_of(status, words, status == 0, self._senders)

    def tell_damage(self) -> None:
        with record_function("dct::exchange"):
            all_gather(self._payloads, self._compressor.pack_damage(), self._group)
