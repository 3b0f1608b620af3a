"""Transports, which turn the payloads of all ranks into their mean on every rank."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from .._torch import span
from ..collectives import all_gather
from .plan import BucketPlan
from .results import ExchangeResult, counts, damaged_messages, header_words, non_finite, overflowed
from .settings import Codec


class Transport(ABC):
    """Turns one bucket's payloads into their mean.

    Args:
        plan: the plan of the bucket.
        codec: packs the payload and unpacks the mean.
        group: the ranks to average over.

    Attributes:
        owned: the start of the range that this rank owns and the owner's residual, which is empty
            if there is no such range.
    """

    _started: dist.Work | None = None

    def __init__(self, plan: BucketPlan, codec: Codec, group: dist.ProcessGroup) -> None:
        self._plan, self._codec, self._group = plan, codec, group
        self._ranks = self._global_ranks()
        self.owned = 0, codec.residual.new_empty(0)

    @abstractmethod
    def start(self) -> None:
        """Start to send the codec's payload."""

    @abstractmethod
    def finish(self, out: Tensor, out_scale: Tensor | None = None) -> Sequence[Tensor]:
        """Write the mean of all ranks' payloads into `out`.

        Returns:
            int32 words on the device for `result`, as tensors of statuses [n] and headers [n, 2].
            The next exchange overwrites the headers.
        """

    @abstractmethod
    def result(self, words: Sequence[Sequence[int]]) -> ExchangeResult:
        """Return the result. `words` are the rows of the tensors of `finish`, on the host."""

    def take_back(self) -> None:
        """Return the entries of the last exchange to residuals, for a step that was not applied."""
        self._codec.take_back()

    def owner_state(self, index: int) -> Tensor | None:
        """The owner's residual for one parameter, copied to the CPU. None if there is no owner."""
        return None

    def load_owner(self, index: int, owner: Tensor) -> Tensor:
        """Resume from the `owner_state` of any transport.

        Returns:
            `owner` with zeros in the range that this rank owns, in units of the mean.
        """
        return owner

    def _wait(self) -> None:
        """Wait for the collective of `start`. On CUDA the current stream waits."""
        if self._started is not None:
            self._started.wait()
            self._started = None

    def _global_ranks(self) -> list[int]:
        """The group's ranks, for error messages after the group was destroyed."""
        return dist.get_process_group_ranks(self._group)


class AllGather(Transport):
    """Uses one all-gather of the payloads. Every rank sums all payloads in rank order.

    With P ranks, each rank sends its payload P - 1 times, so bytes grow with P. This transport is
    efficient if the density is well below 1 / P.
    """

    def __init__(self, plan: BucketPlan, codec: Codec, group: dist.ProcessGroup) -> None:
        super().__init__(plan, codec, group)
        self._payloads = codec.payload.new_zeros(group.size(), codec.payload.numel())
        self._headers = header_words(self._payloads)

    def start(self) -> None:
        self._started = all_gather(self._payloads, self._codec.payload, self._group, async_op=True)

    def finish(self, out: Tensor, out_scale: Tensor | None = None) -> Sequence[Tensor]:
        with span("dct::exchange"):
            self._wait()
        with span("dct::unpack"):
            status = self._codec.unpack(self._payloads, out, out_scale)
        return status, self._headers

    def result(self, words: Sequence[Sequence[int]]) -> ExchangeResult:
        ranks = len(self._ranks)
        codes, headers = [row[0] for row in words[:ranks]], words[ranks:]
        sent = headers[self._group.rank()]
        if any(codes):  # headers of damaged payloads are ignored
            headers = [header for header, code in zip(headers, codes, strict=True) if not code]
        return ExchangeResult(
            damaged=damaged_messages(self._ranks, codes),
            non_finite=non_finite(headers),
            counts=counts([sent]),
            numel=self._plan.numel,
            overflowed=overflowed(headers),
            payloads=ranks,
        )
