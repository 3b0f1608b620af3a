"""Payloads to everybody: one all-gather."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..collectives import all_gather
from .plan import BucketPlan
from .results import ExchangeResult, headers, read_headers
from .settings import Codec


class Transport(ABC):
    """Turns one bucket's payloads into their mean.

    `reduce` returns its raw status, which the caller copies to the host, where `result` reads it.
    Nothing else knows how many payloads there are.

    Args:
        plan: of the bucket.
        codec: packs the payload and unpacks the mean.
        group: the ranks to average over.
    """

    owned: tuple[int, Tensor] | None = None  # where this rank's range begins, its residual as owner

    def __init__(self, plan: BucketPlan, codec: Codec, group: dist.ProcessGroup) -> None:
        self._plan = plan
        self._codec = codec
        self._group = group
        self._ranks = self._global_ranks()

    def start(self) -> None:  # noqa: B027  # by default nothing
        """Begin to send the codec's payload, as far as possible before `reduce`."""

    @abstractmethod
    def reduce(self, out: Tensor, out_scale: Tensor | None = None) -> Sequence[Tensor]:
        """Write the mean of the payloads that all ranks' codecs hold into `out`.

        Returns:
            For `result`: int32 tensors on the device, which the next call overwrites.
        """

    @abstractmethod
    def result(self, raw_status: Sequence[Tensor]) -> ExchangeResult:
        """The result of the last `reduce`, from its raw status on the host."""

    def take_back(self) -> None:
        """Return the entries of the last `reduce` to residuals, for a step that was not applied."""
        self._codec.take_back()

    def owner_state(self, index: int) -> Tensor | None:
        """A copy, on the CPU, of this rank's residual as an owner, for one parameter."""
        return None

    def load_owner(self, index: int, owner: Tensor) -> Tensor:
        """Go on from an `owner_state`, of any transport.

        Returns:
            The part of it that this rank cannot keep, in units of the mean.
        """
        return owner

    def _global_ranks(self) -> list[int]:
        """The group's ranks, as errors call them, which may be raised once the group is gone."""
        return dist.get_process_group_ranks(self._group)

    def _damaged(self, codes: Sequence[int], what: str = "") -> list[str]:
        """The payloads that could not be read, by every rank's status; `what` ends each text."""
        return [
            f"status {code} from rank {rank}{what}"
            for rank, code in zip(self._ranks, codes, strict=True)
            if code
        ]


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
