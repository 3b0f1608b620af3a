"""Payloads to owners, sums to everybody: an all-to-all, then an all-gather."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import span
from ..collectives import all_gather
from .plan import BucketPlan, Slice
from .results import ExchangeResult, counts, header_words, non_finite, overflowed
from .settings import Codec
from .transport import Transport


class ReduceScatter(Transport):
    """Every rank owns a range of the bucket, and compresses its mean once more.

    The payload has a range for each rank, and goes there. An owner sums its range in rank order,
    adds its own residual, which is in units of the mean, and packs entries above its own threshold;
    all ranks gather that. So each rank sends two payloads of 1 / P of the bucket P - 1 times: bytes
    do not grow with P. Our reconstruction: the paper's parameter server compresses one way.

    Ranges are whole blocks: a bucket of fewer than P leaves some ranks without one. Nothing is sent
    to these; in the all-gather they send an empty payload.
    """

    def __init__(self, plan: BucketPlan, codec: Codec, group: dist.ProcessGroup) -> None:
        super().__init__(plan, codec, group)
        rank, ranks = group.rank(), group.size()
        self._owned: dict[int, tuple[int, Slice]] = {}  # where each parameter begins in the range
        at = 0
        for piece in plan.slices(rank):
            self._owned[piece.index] = at, piece
            at += piece.high - piece.low
        low, high = plan.range_bounds[rank : rank + 2]
        device = codec.residual.device
        self._owner = self._codec_of(rank, codec.step)
        self.owned = low, self._owner.residual
        self._packed = False  # the mean of the arrived payloads, by the owner
        self._overwritten = False  # whether a new exchange may have overwritten them
        self._splits = [int(index < plan.owners) for index in range(ranks)]
        rows = codec.payload.view(ranks, -1)
        self._sent = rows[: plan.owners]
        self._arrived = rows.new_zeros(ranks if high > low else 0, rows.shape[1])
        self._results = torch.zeros_like(rows)
        self._no_status = torch.zeros(ranks, dtype=torch.int32, device=device)
        self._headers = header_words(codec.payload), header_words(self._results)
        self._started: dist.Work | None = None

    def start(self) -> None:
        self._packed, self._overwritten = False, True
        received = [len(self._arrived) // self._group.size()] * self._group.size()
        self._started = dist.all_to_all_single(
            self._arrived, self._sent, received, self._splits, self._group, async_op=True
        )

    def finish(self, out: Tensor, out_scale: Tensor | None = None) -> Sequence[Tensor]:
        with span("dct::exchange"):
            self._wait()
        with span("dct::sum"):
            status, packed = self._compress_mean()
        with span("dct::gather_results"):
            self._gather_results(packed)
        with span("dct::unpack"):
            result = self._codec.unpack(self._results.unsqueeze(0), out, out_scale)
        self._overwritten = False
        return status, result, *self._headers

    def result(self, words: Sequence[Sequence[int]]) -> ExchangeResult:
        ranks, owners = len(self._ranks), sum(self._splits)
        damaged = self._damaged([row[0] for row in words[:ranks]])
        code, headers = words[ranks][0], words[ranks + 1 :]
        sent, results = headers[:ranks], headers[ranks:]  # to owners, and by owners
        if code:
            damaged += self._damaged_results(code)
            results = []  # headers of damaged payloads are ignored
        payloads = [*sent[:owners], *results[:owners]]
        return ExchangeResult(
            damaged=damaged,
            # If an owner received or dropped a NaN or Inf, there is one in its sum.
            non_finite=non_finite(results),
            counts=counts(sent),
            numel=self._plan.numel,
            overflowed=overflowed(payloads),
            payloads=len(payloads),
        )

    def _damaged_results(self, code: int) -> list[str]:
        """The owners whose payloads cannot be read, by the status of all of them together.

        If the payloads are still there, they are unpacked one by one.
        """
        if self._overwritten:
            ranks = ", ".join(map(str, self._ranks))
            return [f"status {code} from one of ranks {ranks}, of the mean"]
        codes: list[int] = []
        for owner, result in enumerate(self._results):
            codec = self._codec_of(owner, 0)
            codes += codec.unpack(result.unsqueeze(0), torch.empty_like(codec.residual)).tolist()
        return self._damaged(codes, ", of the mean")

    def _codec_of(self, owner: int, step: int) -> Codec:
        """A codec of this owner's range alone, with payloads as long as the longest range's."""
        low, high = self._plan.range_bounds[owner : owner + 2]
        device, longest = self._codec.residual.device, self._plan.range_bounds[1]
        return self._plan.settings.codec(high - low, 1, device, step, row_of=longest)

    def take_back(self) -> None:
        """Exact for the ranks' own residuals, to float32 rounding for the owner's."""
        super().take_back()
        if self._packed and len(self._arrived):  # not if the first exchange failed
            mean = torch.empty_like(self._owner.residual)
            self._owner.unpack(self._arrived, mean)
            self._owner.take_back(mean)

    def owner_state(self, index: int) -> Tensor:
        residual = torch.zeros(self._plan.sizes[index], dtype=torch.float32, device="cpu")
        if index in self._owned:
            at, piece = self._owned[index]
            own = self._owner.residual[at:][: piece.high - piece.low]
            residual[piece.low : piece.high] = own.cpu()
        return residual

    def load_owner(self, index: int, owner: Tensor) -> Tensor:
        if index not in self._owned:
            return owner
        at, piece = self._owned[index]
        own = owner[piece.low : piece.high]
        self._owner.residual[at:][: piece.high - piece.low].copy_(own)
        others = owner.clone()
        others[piece.low : piece.high] = 0
        return others

    def _wait(self) -> None:
        """Wait for the payloads of the range that this rank owns. On CUDA the stream waits."""
        if self._started is not None:
            self._started.wait()
            self._started = None

    def _compress_mean(self) -> tuple[Tensor, Tensor]:
        """(the senders' status, the payload) of the mean of this rank's own range."""
        if len(self._arrived):
            status, packed = self._owner.pack_mean(self._arrived)
        else:  # an empty range
            status, packed = self._no_status, self._owner.pack(self._owner.residual)
        self._packed = True
        return status, packed

    def _gather_results(self, packed: Tensor) -> None:
        """Send this owner's payload to all ranks, and receive theirs."""
        all_gather(self._results, packed, self._group)
