"""Payloads to owners, sums to everybody: an all-to-all, then an all-gather."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from .. import wire
from ..collectives import all_gather
from .codec import Codec
from .headers import fault_flags_of, headers, read_headers
from .plan import BucketPlan, Slice
from .results import ExchangeResult, Traffic, Verdict
from .segment_state import SegmentState
from .transport import Transport


class ReduceScatter(Transport):
    """Every rank owns a range of the bucket, and compresses its mean once more.

    The payload has a range for each rank, and goes there. An owner sums its range in rank order,
    adds its own residual, which is in units of the mean, and packs entries above its own threshold;
    all ranks gather that. So each rank sends two payloads of 1 / P of the bucket P - 1 times: bytes
    do not grow with P. Our reconstruction: the paper's parameter server compresses one way.

    Ranges are whole blocks: a bucket of fewer than P leaves some ranks without one. Nothing is sent
    to these; they send an empty payload, because its header tells of damage.

    If an owner receives a damaged payload, its own payload says so: every rank learns of it
    together with the result.
    """

    name = "reduce_scatter"

    @staticmethod
    def ranges(ranks: int) -> int:
        return ranks

    @staticmethod
    def wire_bytes(plan: BucketPlan) -> int:
        # To all other owners; a rank that owns nothing sends to all owners.
        to_owners = min(plan.owners, plan.ranks - 1)
        results = wire.all_gather_bytes(plan.payload_bytes, plan.ranks)
        return to_owners * plan.payload_bytes + results

    def __init__(self, plan: BucketPlan, codec: Codec, group: dist.ProcessGroup) -> None:
        super().__init__(plan, codec, group)
        rank, ranks = group.rank(), group.size()
        self._sizes = plan.sizes
        self._owned: dict[int, tuple[int, Slice]] = {}  # where each parameter begins in the range
        at = 0
        for piece in plan.slices(rank):
            self._owned[piece.index] = at, piece
            at += piece.high - piece.low
        low, high = plan.range_bounds[rank : rank + 2]
        device, longest = codec.residual.device, plan.range_bounds[1]
        self._owner = plan.settings.codec([0, high - low], device, codec.step, row_of=longest)
        self.owned = low, self._owner.residual
        self._mean = torch.zeros_like(self._owner.residual)
        self._packed = False  # this mean, by the owner
        self._splits = [int(index < plan.owners) for index in range(ranks)]
        rows = codec.payload.view(ranks, -1)
        self._sent = rows[: plan.owners]
        self._arrived = rows.new_zeros(ranks if high > low else 0, rows.shape[1])
        self._results = torch.zeros_like(rows)
        self._no_status = torch.zeros(ranks, dtype=torch.int32, device=device)
        self._headers = [*headers(codec.payload), *headers(self._results)]

    def reduce(self, out: Tensor, out_scale: Tensor | None = None) -> Sequence[Tensor]:
        self._packed = False
        self._to_owners()
        status = self._no_status
        if self._mean.numel():
            with record_function("dct::sum"):
                status = self._owner.unpack(self._arrived, self._mean)
                packed = self._owner.pack(self._mean, status=status)
        else:
            packed = self._owner.pack(self._mean)
        self._packed = True
        self._to_everybody(packed)
        with record_function("dct::unpack"):
            result = self._codec.unpack(self._results.unsqueeze(0), out, out_scale)
        return status, result, *self._headers

    def result(self, raw_status: Sequence[Tensor]) -> ExchangeResult:
        status, result, *words = raw_status
        codes = zip(self._ranks, status.tolist(), strict=True)
        damaged = [f"status {code} from rank {rank}" for rank, code in codes if code]
        (code,) = result.tolist()
        if code:
            damaged.append(f"status {code} from the owners of ranges")
        ranks = self._group.size()
        sent, results = read_headers(words[:ranks]), read_headers(words[ranks:])
        if code:  # headers of damaged payloads are ignored
            results = []
        payloads = [*sent[: sum(self._splits)], *results[: sum(self._splits)]]
        verdict = Verdict(
            damaged=damaged,
            told=[r for r, h in zip(self._ranks, results, strict=False) if h.damage],
            # Of what an owner received, or lost, there is a NaN or Inf in its sum.
            non_finite=any(header.non_finite for header in results),
        )
        traffic = Traffic(
            counts=[header.count for header in sent],
            numel=self._numel,
            overflowed=sum(header.overflow for header in payloads),
            payloads=len(payloads),
        )
        return ExchangeResult(verdict, traffic)

    def fault_flags(self, raw_status: Sequence[Tensor]) -> Tensor:
        status, result, *words = raw_status
        results = words[self._group.size() :]
        return fault_flags_of(torch.cat([status, result]), results, result == 0, self._senders)

    def announce_damage(self) -> None:
        self._codec.pack_damage()
        self._to_owners()
        self._to_everybody(self._owner.pack_damage())

    def take_back(self) -> None:
        """Exact for the ranks' own residuals, to float32 rounding for the owner's."""
        super().take_back()
        if self._packed:  # not if the first exchange failed
            self._owner.take_back()
            self._owner.residual -= torch.where(self._mean.isfinite(), self._mean, 0.0)

    def owner_state(self, index: int) -> SegmentState:
        residual = torch.zeros(self._sizes[index])
        if index in self._owned:
            at, piece = self._owned[index]
            own = self._owner.residual[at:][: piece.high - piece.low]
            residual[piece.low : piece.high] = own.cpu()
        return SegmentState(residual)

    def load_owner(self, index: int, owner: SegmentState) -> Tensor:
        if index not in self._owned:
            return owner.residual
        at, piece = self._owned[index]
        own = owner.residual[piece.low : piece.high]
        self._owner.residual[at:][: piece.high - piece.low].copy_(own)
        others = owner.residual.clone()
        others[piece.low : piece.high] = 0
        return others

    def _to_owners(self) -> None:
        with record_function("dct::exchange"):
            received = [len(self._arrived) // self._group.size()] * self._group.size()
            dist.all_to_all_single(
                self._arrived, self._sent, received, self._splits, group=self._group
            )

    def _to_everybody(self, packed: Tensor) -> None:
        with record_function("dct::gather_results"):
            all_gather(self._results, packed, self._group)
