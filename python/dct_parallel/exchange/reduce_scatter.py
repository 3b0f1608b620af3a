"""Reduces payloads with an all-to-all to the owners of ranges and an all-gather of the results."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import span
from ..collectives import all_gather
from .plan import BucketPlan, Slice, slices
from .results import ExchangeResult, counts, damaged_messages, header_words, non_finite, overflowed
from .settings import Codec
from .transport import Transport


class ReduceScatter(Transport):
    """Each owner averages one range of the bucket, and compresses the mean again.

    Each rank sends one payload to each owner. An owner averages the payloads in rank order, adds
    its residual, which is in units of the mean, and packs the sum. All ranks gather the results.
    With P ranks, each rank sends 2 (P - 1) payloads, each for 1 / P of the bucket. So bytes per
    rank hardly grow with P. This project replaces the parameter server of the DCT paper
    (arXiv 2010.08899) in this way.

    Ranges consist of whole blocks. In a small bucket, the last ranges may be empty. The ranks of
    empty ranges receive no payloads, and send an empty payload in the all-gather.
    """

    def __init__(self, plan: BucketPlan, codec: Codec, group: dist.ProcessGroup) -> None:
        super().__init__(plan, codec, group)
        rank, ranks = group.rank(), group.size()
        self._owned: dict[int, tuple[int, Slice]] = {}  # {parameter: (offset in the range, slice)}
        offset = 0
        low, high = plan.range_bounds[rank : rank + 2]
        for piece in slices(plan.sizes, low, high):
            self._owned[piece.index] = offset, piece
            offset += piece.high - piece.low
        device = codec.residual.device
        self._owner = self._codec_of(rank, codec.step)
        self.owned = low, self._owner.residual
        # The mean of the payloads that arrived.
        self._mean = torch.empty(high - low, dtype=torch.float32, device=device)
        self._packed = False  # whether the owner has packed the mean of the received payloads
        self._overwritten = False  # whether a new exchange may have overwritten the results
        self._splits = [int(index < plan.owners) for index in range(ranks)]
        rows = codec.payload.view(ranks, -1)
        self._sent = rows[: plan.owners]
        self._arrived = rows.new_zeros(ranks if high > low else 0, rows.shape[1])
        self._results = torch.zeros_like(rows)
        self._no_status = torch.zeros(ranks, dtype=torch.int32, device=device)
        self._headers = header_words(codec.payload), header_words(self._results)

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
        damaged = damaged_messages(self._ranks, [row[0] for row in words[:ranks]])
        code, headers = words[ranks][0], words[ranks + 1 :]
        sent, results = headers[:ranks], headers[ranks:]  # sent to owners, and sent by owners
        if code:
            damaged += self._damaged_results(code)
            results = []  # headers of damaged payloads are ignored
        payloads = [*sent[:owners], *results[:owners]]
        return ExchangeResult(
            damaged=damaged,
            # If an owner received a NaN or Inf, its mean also contains a NaN or Inf.
            non_finite=non_finite(results),
            counts=counts(sent),
            numel=self._plan.numel,
            overflowed=overflowed(payloads),
            payloads=len(payloads),
        )

    def _damaged_results(self, code: int) -> list[str]:
        """Describe the owners' damaged payloads, given their combined status.

        Unless the payloads were overwritten, the method unpacks each one to find the damaged ones.
        """
        if self._overwritten:
            ranks = ", ".join(map(str, self._ranks))
            return [f"status {code} from one of ranks {ranks}, of the mean"]
        codes: list[int] = []
        for owner, result in enumerate(self._results):
            low, high = self._plan.range_bounds[owner : owner + 2]
            out = torch.empty(high - low, dtype=torch.float32, device=result.device)
            codes += self._codec_of(owner, 0).unpack(result.unsqueeze(0), out).tolist()
        return damaged_messages(self._ranks, codes, ", of the mean")

    def _codec_of(self, owner: int, step: int) -> Codec:
        """Create a codec for the range of `owner`, with the payload size of the longest range."""
        low, high = self._plan.range_bounds[owner : owner + 2]
        device, longest = self._codec.residual.device, self._plan.range_bounds[1]
        return self._plan.settings.codec(high - low, 1, device, step, row_of=longest)

    def take_back(self) -> None:
        """Restore senders' residuals exactly, and the owner's residual up to float32 rounding."""
        super().take_back()
        if self._packed and len(self._arrived):  # not packed if the all-to-all failed
            self._owner.unpack(self._arrived, self._mean)
            self._owner.take_back(self._mean)

    def owner_state(self, index: int) -> Tensor:
        residual = torch.zeros(self._plan.sizes[index], dtype=torch.float32, device="cpu")
        if index in self._owned:
            offset, piece = self._owned[index]
            owned = self._owner.residual[offset:][: piece.high - piece.low]
            residual[piece.low : piece.high] = owned.cpu()
        return residual

    def load_owner(self, index: int, owner: Tensor) -> Tensor:
        if index not in self._owned:
            return owner
        offset, piece = self._owned[index]
        owned = owner[piece.low : piece.high]
        self._owner.residual[offset:][: piece.high - piece.low].copy_(owned)
        rest = owner.clone()
        rest[piece.low : piece.high] = 0
        return rest

    def _compress_mean(self) -> tuple[Tensor, Tensor]:
        """Pack the mean of this rank's range. Returns the status of each sender and the payload."""
        if len(self._arrived):
            status = self._owner.unpack(self._arrived, self._mean)
            packed = self._owner.pack(self._mean)
        else:  # an empty range
            status, packed = self._no_status, self._owner.pack(self._mean)
        self._packed = True
        return status, packed

    def _gather_results(self, packed: Tensor) -> None:
        """Gather the payloads of all owners."""
        all_gather(self._results, packed, self._group)
