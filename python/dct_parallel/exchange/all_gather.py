"""Payloads to everybody: one all-gather."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..collectives import all_gather
from .codec import Codec
from .headers import headers, read_headers
from .plan import BucketPlan
from .results import ExchangeResult
from .transport import Transport


class AllGather(Transport):
    """One all-gather of the payload; every rank sums all of them, in rank order.

    Each rank sends its payload P - 1 times, so bytes grow with P: it pays if the density is well
    below 1 / P.
    """

    def __init__(self, plan: BucketPlan, codec: Codec, group: dist.ProcessGroup) -> None:
        super().__init__(plan, codec, group)
        self._payloads = codec.payload.new_zeros(group.size(), codec.payload.numel())
        self._headers = headers(self._payloads)
        self._started: dist.Work | None = None

    def start(self) -> None:
        self._started = all_gather(self._payloads, self._codec.payload, self._group, async_op=True)

    def reduce(self, out: Tensor, out_scale: Tensor | None = None) -> Sequence[Tensor]:
        with record_function("dct::exchange"):
            self._gather()
        with record_function("dct::unpack"):
            status = self._codec.unpack(self._payloads, out, out_scale)
        return status, *self._headers

    def result(self, raw_status: Sequence[Tensor]) -> ExchangeResult:
        status, *words = raw_status
        codes, sent = status.tolist(), read_headers(words)
        # Headers of damaged payloads are ignored.
        intact = [h for h, code in zip(sent, codes, strict=True) if not code]
        return ExchangeResult(
            damaged=self._damaged(codes),
            non_finite=any(header.non_finite for header in intact),
            counts=[sent[self._group.rank()].count],
            numel=self._plan.numel,
            overflowed=sum(header.overflow for header in intact),
            payloads=len(sent),
        )

    def _gather(self) -> None:
        """All ranks' payloads into this rank's, if that has not begun."""
        if self._started is None:
            all_gather(self._payloads, self._codec.payload, self._group)
        else:
            self._started.wait()  # on CUDA it is the stream that waits
            self._started = None
