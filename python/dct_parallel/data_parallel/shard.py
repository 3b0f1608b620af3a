"""Payloads to owners, sums to everybody: an all-to-all, then an all-gather."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from dct_kernels.layout import payload_layout

from .. import wire
from ..collectives import all_gather
from ..compressor import Compressor
from .bucket_plan import BucketPlan, Slice
from .checkpoint import OWED, SegmentState
from .link import Link
from .transports import Receipt, Transport, alarms_of, compressor_of, headers, read_headers


class Shard(Transport):
    """Every rank owns a range of the bucket, and compresses its mean once more.

    The payload has a range for each rank, and goes there. An owner sums its range in rank order,
    adds its own residual, which is in units of the mean, and packs what passes its own threshold;
    all ranks gather that. So a rank sends two payloads of 1 / P of the bucket P - 1 times: bytes do
    not grow with P. Our reconstruction: the paper's parameter server compresses one way.

    Ranges are whole blocks: a bucket of fewer than P leaves some ranks without one. Nothing is sent
    to these; they send an empty payload, as its header says what a rank knows of damage.

    Where damage is found in what arrives first, the owner's payload says so: every rank knows of it
    together with the result.
    """

    name = "shard"

    def __init__(
        self, plan: BucketPlan, compressor: Compressor, group: dist.ProcessGroup, step: int
    ) -> None:
        super().__init__(plan, compressor, group, step)
        rank, ranks = group.rank(), group.size()
        self._sizes = plan.sizes
        self._owned: dict[int, tuple[int, Slice]] = {}  # where each parameter begins in the range
        at = 0
        for piece in plan.slices(rank):
            self._owned[piece.index] = at, piece
            at += piece.high - piece.low
        low, high = plan.range_bounds[rank : rank + 2]
        numel = high - low
        self._owner = compressor_of(plan, [0, numel], step, compressor.residual.device)
        self._mean = torch.zeros_like(self._owner.residual)
        self._splits = [int(index < plan.owners) for index in range(ranks)]
        # A short range has fewer blocks than the room for their starts in its row. Read or packed
        # by itself it has no more than it needs, and positions follow sooner.
        dtype = compressor.value_dtype
        self._in_row = payload_layout(plan.numel, plan.capacity, dtype, ranks).positions
        self._alone = payload_layout(numel, plan.capacity, dtype).positions
        rows = compressor.payload.view(ranks, -1)
        self._sent = rows[: plan.owners]
        self._arrived = rows.new_zeros(ranks if numel else 0, rows.shape[1])
        self._row = torch.zeros_like(rows[0])
        self._results = torch.zeros_like(rows)
        self._no_status = torch.zeros(ranks, dtype=torch.int32, device=rows.device)
        self._headers = [*headers(compressor.payload), *headers(self._results)]

    @staticmethod
    def ranges(ranks: int) -> int:
        return ranks

    @staticmethod
    def wire_bytes(plan: BucketPlan) -> int:
        # To all other owners; a rank that owns nothing sends to all there are.
        to_owners = min(plan.owners, plan.ranks - 1)
        results = wire.all_gather_bytes(plan.payload_bytes, plan.ranks)
        return to_owners * plan.payload_bytes + results

    @staticmethod
    def seconds(plan: BucketPlan, link: Link) -> float:
        results = wire.all_gather_bytes(plan.payload_bytes, plan.ranks)
        sent = link.all_to_all.seconds(plan.wire_bytes - results) + link.all_gather.seconds(results)
        owned = plan.numel / max(plan.owners, 1)
        return sent + (plan.numel + owned) * (link.pack + link.unpack)

    def reduce(self, out: Tensor, out_scale: Tensor | None = None) -> Sequence[Tensor]:
        self._to_owners()
        status = self._no_status
        if self._mean.numel():
            with record_function("dct::sum"):
                status = self._owner.unpack(self._read_alone(self._arrived), self._mean)
                self._owner.pack(self._mean, status=status)
        else:
            self._owner.pack(self._mean)
        self._to_everybody()
        with record_function("dct::unpack"):
            results = self._results.unsqueeze(0)
            result = self._compressor.unpack(results, out, out_scale)
        return status, result, *self._headers

    def receipt(self, notes: Sequence[Tensor]) -> Receipt:
        status, result, *words = notes
        codes = zip(self._ranks, status.tolist(), strict=True)
        damaged = [f"status {code} from rank {rank}" for rank, code in codes if code]
        (code,) = result.tolist()
        if code:
            damaged.append(f"status {code} from the owners of ranges")
        ranks = self._group.size()
        sent, results = read_headers(words[:ranks]), read_headers(words[ranks:])
        if code:  # what was damaged says nothing
            results = []
        payloads = [*sent[: sum(self._splits)], *results[: sum(self._splits)]]
        return Receipt(
            damaged=damaged,
            told=[r for r, h in zip(self._ranks, results, strict=False) if h.damage],
            # Of what an owner received, or lost, there is a NaN or Inf in its sum.
            non_finite=any(header.non_finite for header in results),
            counts=[header.count for header in sent],
            overflowed=sum(header.overflow for header in payloads),
            payloads=len(payloads),
        )

    def alarms(self, notes: Sequence[Tensor]) -> Tensor:
        status, result, *words = notes
        results = words[self._group.size() :]
        return alarms_of(torch.cat([status, result]), results, result == 0, self._senders)

    def tell_damage(self) -> None:
        self._compressor.pack_damage()
        self._to_owners()
        self._owner.pack_damage()
        self._to_everybody()

    def take_back(self) -> None:
        """To float32 rounding in the owner's residual: the ranks' own is exact."""
        super().take_back()
        self._owner.take_back()
        self._owner.residual -= torch.where(self._mean.isfinite(), self._mean, 0.0)

    def segment_state(self, index: int) -> SegmentState:
        """What the owner owes, as long as the parameter: 0 outside of what is owned."""
        if index not in self._owned:
            return {}
        at, piece = self._owned[index]
        owed = torch.zeros(self._sizes[index])
        owed[piece.low : piece.high] = self._owner.residual[at:][: piece.high - piece.low].cpu()
        return {OWED: owed}

    def load_segment(self, index: int, state: SegmentState) -> Tensor | None:
        owed = state.get(OWED)
        if owed is not None and index in self._owned:
            at, piece = self._owned[index]
            self._owner.residual[at:][: piece.high - piece.low].copy_(owed[piece.low : piece.high])
            owed = owed.clone()
            owed[piece.low : piece.high] = 0
        return owed

    def _to_owners(self) -> None:
        with record_function("dct::exchange"):
            received = [len(self._arrived) // self._group.size()] * self._group.size()
            dist.all_to_all_single(
                self._arrived, self._sent, received, self._splits, group=self._group
            )

    def _to_everybody(self) -> None:
        payload = self._owner.payload
        if self._alone != self._in_row:
            self._row[: self._alone] = payload[: self._alone]
            self._row[self._in_row :] = payload[self._alone :]
            payload = self._row
        with record_function("dct::gather_results"):
            all_gather(self._results, payload, self._group)

    def _read_alone(self, rows: Tensor) -> Tensor:
        if self._alone == self._in_row:
            return rows
        return torch.cat([rows[:, : self._alone], rows[:, self._in_row :]], dim=1)
