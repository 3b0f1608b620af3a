"""Runs the exchange of dct_parallel between ranks in one process; collectives are copies.

Each rank has a `Bucket`, but `finish` is called only for the first rank. This call copies the
messages of the other ranks. Their transports compute these messages when they are copied.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from dct_parallel.exchange.bucket import Bucket
from dct_parallel.exchange.plan import BucketPlan
from dct_parallel.exchange.reduce_scatter import ReduceScatter
from dct_parallel.exchange.results import StepResults, run_now
from dct_parallel.exchange.settings import Settings
from dct_parallel.exchange.transport import AllGather, Transport


class _Rank:
    """Replaces a process group. `peers` are the transports of all ranks, in order."""

    def __init__(self, number: int, ranks: int, peers: list[Transport]) -> None:
        self.number, self.ranks, self.peers = number, ranks, peers

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


class _InProcess(Transport):
    def __init__(self, plan, codec, group: _Rank) -> None:
        super().__init__(plan, codec, group)
        self._peers = group.peers
        self._peers.append(self)

    def _global_ranks(self) -> list[int]:
        return list(range(self._group.size()))

    def start(self) -> None:
        """Do nothing, because the payload is copied when it is needed."""


class _AllGather(_InProcess, AllGather):
    def _wait(self) -> None:
        torch.stack([peer._codec.payload for peer in self._peers], out=self._payloads)


class _ReduceScatter(_InProcess, ReduceScatter):
    def _wait(self) -> None:
        # `_arrived` is empty if this rank owns no entries.
        for row, peer in zip(self._arrived, self._peers, strict=False):
            row.copy_(peer._sent[self._group.rank()])

    def _gather_results(self, packed: Tensor) -> None:
        for row, peer in zip(self._results, self._peers, strict=True):
            row.copy_(packed if peer is self else peer._result())

    def _result(self) -> Tensor:
        """The payload that this rank sends as an owner."""
        self._wait()
        status, packed = self._compress_mean()
        assert not status.any()
        return packed


class _Bucket(Bucket):
    transports: ClassVar = {"all_gather": _AllGather, "reduce_scatter": _ReduceScatter}


class Buckets:
    """One bucket with all parameters on each rank.

    Args:
        sizes: numbers of elements of the parameters.
        ranks: number of ranks.
        density, format: see `DCTState`.
        transport: "all_gather" or "reduce_scatter".
    """

    def __init__(
        self, sizes: Sequence[int], ranks: int, density: float, format: str, transport: str
    ) -> None:
        settings = Settings.checked("simulation", density, format)
        names = tuple(str(number) for number in range(len(sizes)))
        self.plan = BucketPlan(names, tuple(sizes), settings, transport, ranks)
        peers: list[Transport] = []
        self._buckets = [
            _Bucket(self.plan, _Rank(rank, ranks, peers), torch.device("cpu"), 0, {})
            for rank in range(ranks)
        ]

    def mean(self, tensors: Sequence[Tensor]) -> Tensor:
        """The mean [numel] of the ranks' tensors, as every rank computes it."""
        for bucket, tensor in zip(self._buckets, tensors, strict=True):
            bucket.start(tensor)
        first, mean = self._buckets[0], torch.empty_like(tensors[0])
        first.finish(mean)
        assert not StepResults({"": first}, run_now).read()[""].damaged
        return mean

    def unsent(self) -> list[Tensor]:
        """The residual [numel] of each rank."""
        return [bucket.codec.residual for bucket in self._buckets]
