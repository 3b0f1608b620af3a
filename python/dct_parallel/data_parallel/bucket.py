"""One bucket of DDP's: its large parameters compressed, its small ones dense, in place."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels.layout import FLAG_NON_FINITE, FLAG_OVERFLOW, HEADER, HEADER_BYTES

from ..collectives import dense_mean
from ..compressor import Compressor
from ..readback import Readback
from .bucket_plan import BucketPlan


class Report(NamedTuple):
    """What the host learns of a bucket one step later; undamaged, the same on every rank."""

    damaged: dict[int, int]  # rank -> status of the payload that this rank received from it
    damaged_anywhere: bool  # some rank received a damaged payload; the same on every rank
    non_finite: bool  # a NaN or Inf in any rank's gradient
    payloads: int  # received, one from each rank
    overflowed: int  # of them: too small for what passed
    packed: int  # entries in them


class Bucket:
    """The compressor, the transport and the dense remainder of one bucket.

    Args:
        plan: names and sizes, in the bucket's order.
        group: the ranks to average over.
        device: of the gradients.
        step: compressed steps taken so far, where the refresh schedule goes on.
        states: {name: `Compressor.segment_state`} to start from; missing names start from zero.
    """

    def __init__(
        self,
        plan: BucketPlan,
        group: dist.ProcessGroup,
        device: torch.device,
        step: int,
        states: dict[str, dict[str, Tensor]],
    ) -> None:
        self.plan = plan
        self._group = group
        self._fresh = False  # a `reduce` has not been reported yet
        spans = [torch.arange(plan.bounds[i], plan.bounds[i + 1]) for i in sorted(plan.dense)]
        none = torch.empty(0, dtype=torch.int64)
        self._dense_index = torch.cat([none, *spans]).to(device)
        self._mean = Readback()
        self.compressor = None
        if plan.compressed_numel:
            self.compressor = _compressor(plan, device, step, states)
            self._transport = plan.settings.transport(self.compressor, group)
            self._received = Readback()

    def reduce(
        self, buffer: Tensor, scale: Tensor | None = None, inv_scale: Tensor | None = None
    ) -> None:
        """Replace this rank's gradients in `buffer` by their mean over the group.

        Args:
            buffer: float32, bfloat16 or float16 [numel], in units of `scale`.
            scale, inv_scale: a GradScaler's scale and its inverse, or None.
        """
        small = buffer.index_select(0, self._dense_index)  # before unpacking overwrites the bucket
        damage = small.new_zeros(1)
        if self.compressor is not None:
            payload = self.compressor.pack(buffer, inv_scale)
            status = self._transport.reduce(payload, buffer, scale)
            damage = status.count_nonzero().view(1).to(small.dtype)
            headers = self._transport.payloads[:, :HEADER_BYTES]
            self._received.post(status, headers, self.compressor.seen, self.compressor.threshold)
        # One element more tells every rank whether any of them received a damaged payload.
        mean = dense_mean(torch.cat([small, damage]), self.plan.settings.value_dtype, self._group)
        buffer.index_copy_(0, self._dense_index, mean[:-1].to(buffer.dtype))
        self._mean.post(mean)
        self._fresh = True

    def take_report(self) -> Report | None:
        """What the last `reduce` left to be known, once; None if there is nothing new.

        To be called before the next `reduce`, which overwrites what is read here.
        """
        if not self._fresh:
            return None
        self._fresh = False
        damaged: dict[int, int] = {}
        payloads = flags = overflowed = packed = 0
        if self.compressor is not None:
            status, headers, seen, threshold = self._received.wait()
            self.compressor.resample_if_flooded(seen, threshold)
            damaged = {rank: code for rank, code in enumerate(status.tolist()) if code}
            payloads = len(status)
            for rank, header in enumerate(HEADER.iter_unpack(bytes(headers.flatten().tolist()))):
                _, _, _, rank_flags, _, _, count, _ = header
                if rank not in damaged:
                    flags |= rank_flags
                    overflowed += bool(rank_flags & FLAG_OVERFLOW)
                    packed += count
        (mean,) = self._mean.wait()
        return Report(
            damaged=damaged,
            damaged_anywhere=bool(mean[-1] != 0),
            non_finite=bool(flags & FLAG_NON_FINITE) or not bool(mean.isfinite().all()),
            payloads=payloads,
            overflowed=overflowed,
            packed=packed,
        )

    def take_back(self) -> None:
        """Return what the last `reduce` sent to the residual, for a step that was not applied."""
        if self.compressor is not None:
            self.compressor.take_back()

    def states(self) -> dict[str, dict[str, Tensor]]:
        """{name: `Compressor.segment_state`} of the compressed parameters."""
        if self.compressor is None:
            return {}
        return {
            name: self.compressor.segment_state(index)
            for index, name in enumerate(self.plan.names)
            if index not in self.plan.dense
        }


def describe_damage(step: int, reports: dict[int, Report]) -> str:
    """The error that every rank raises; it names what was damaged, if this rank received it."""
    here = [
        f"status {code} from rank {rank} in bucket {index}"
        for index, report in sorted(reports.items())
        for rank, code in report.damaged.items()
    ]
    got = "; ".join(here) if here else "damage that another rank reports"
    return f"dct::dct_hook: every payload of step {step} must be intact, got {got}"


def _compressor(
    plan: BucketPlan, device: torch.device, step: int, states: dict[str, dict[str, Tensor]]
) -> Compressor:
    compressor = Compressor(
        plan.bounds[-1],
        plan.bounds,
        plan.settings.density,
        refresh_every=plan.settings.refresh_every,
        policy=plan.settings.policy,
        value_dtype=plan.settings.value_dtype,
        skip=plan.dense,
        capacity=plan.capacity,
        device=device,
    )
    compressor.step = step
    for index, name in enumerate(plan.names):
        if name in states:
            compressor.load_segment(index, states[name])
    return compressor
