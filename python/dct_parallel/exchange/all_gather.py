"""Payloads to everybody: one all-gather."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from .. import wire
from ..collectives import all_gather
from .codec import Codec
from .headers import Header, fault_flags_of, headers, read_headers
from .plan import BucketPlan
from .results import ExchangeResult, Traffic, Verdict
from .transport import Transport


class AllGather(Transport):
    """One all-gather of the payload; every rank sums all of them, in rank order.

    Each rank sends its payload P - 1 times, so bytes grow with P: it pays if the density is well
    below 1 / P.
    """

    name = "all_gather"

    @staticmethod
    def ranges(ranks: int) -> int:
        return 1

    @staticmethod
    def wire_bytes(plan: BucketPlan) -> int:
        return wire.all_gather_bytes(plan.payload_bytes, plan.ranks)

    def __init__(self, plan: BucketPlan, codec: Codec, group: dist.ProcessGroup) -> None:
        super().__init__(plan, codec, group)
        self._payloads = codec.payload.new_zeros(group.size(), codec.payload.numel())
        self._headers = headers(self._payloads)
        self._started: dist.Work | None = None

    def start(self) -> None:
        self._started = all_gather(self._payloads, self._codec.payload, self._group, async_op=True)

    def reduce(self, out: Tensor, out_scale: Tensor | None = None) -> Sequence[Tensor]:
        with record_function("dct::exchange"):
            if self._started is None:
                all_gather(self._payloads, self._codec.payload, self._group)
            else:
                self._started.wait()  # on CUDA it is the stream that waits
                self._started = None
        with record_function("dct::unpack"):
            status = self._codec.unpack(self._payloads, out, out_scale)
        return status, *self._headers

    def result(self, raw_status: Sequence[Tensor]) -> ExchangeResult:
        status, *words = raw_status
        codes = status.tolist()
        # Headers of damaged payloads are ignored.
        intact = [
            Header(0, 0) if code else header
            for code, header in zip(codes, read_headers(words), strict=True)
        ]
        verdict = Verdict(
            damaged=[
                f"status {code} from rank {rank}"
                for rank, code in zip(self._ranks, codes, strict=True)
                if code
            ],
            told=[r for r, header in zip(self._ranks, intact, strict=True) if header.damage],
            non_finite=any(header.non_finite for header in intact),
        )
        traffic = Traffic(
            counts=[intact[self._group.rank()].count],
            numel=self._numel,
            overflowed=sum(header.overflow for header in intact),
            payloads=len(intact),
        )
        return ExchangeResult(verdict, traffic)

    def fault_flags(self, raw_status: Sequence[Tensor]) -> Tensor:
        status, *words = raw_status
        return fault_flags_of(status, words, status == 0, self._senders)

    def announce_damage(self) -> None:
        with record_function("dct::exchange"):
            all_gather(self._payloads, self._codec.pack_damage(), self._group)
