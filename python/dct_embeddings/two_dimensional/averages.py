"""Averages over replicas of a table, of the rows that changed since the last sync.

Each replica changed rows of its own. Their union is averaged, the rows that some replica changed.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks
from dct_parallel.collectives import all_gather, dense_mean
from dct_parallel.exchange.bucket import Bucket, StepResults, run_now
from dct_parallel.exchange.plan import plan_bucket
from dct_parallel.exchange.settings import Settings

from .touched_rows import TouchedRows

_OP = "ReplicaSync"
_Rows = tuple[Tensor, Tensor]  # as `TouchedRows.take` gives them


class Average:
    """The mean of all replicas' rows of a weight [rows, d], as they are.

    Attributes:
        touched: rows that the optimizer of this replica has changed.
    """

    _keeps_base = False  # values of changed rows as of the last sync

    def __init__(self, weight: Tensor, group: dist.ProcessGroup) -> None:
        self.touched = TouchedRows(weight, self._keeps_base)
        self._group = group

    def sync(self, weight: Tensor, state: Tensor | None, everything: bool) -> Tensor:
        """Average in place; returns the rows that some replica changed.

        Args:
            state: of the optimizer [rows], averaged as it is.
            everything: whether to leave no residual.
        """
        touched = self.touched.take(weight)
        changed = _union(touched[0], self._group)
        self._average(weight, changed, touched, everything)
        if state is not None:
            state[changed] = dense_mean(state[changed], state.dtype, self._group)
        return changed

    def _average(self, weight: Tensor, changed: Tensor, touched: _Rows, everything: bool) -> None:
        """Average the rows `changed`, of which this replica changed those of `touched`."""
        weight[changed] = dense_mean(weight[changed], weight.dtype, self._group)


class MeanOfChanges(Average):
    """Base + the mean of replicas' changes, with error feedback.

    What is not sent leaves the weights and stays in `residual`, for `rows`: those that some replica
    changed since there was no residual. They take part in every sync until `everything` is sent.

    Args:
        settings: of a bucket, made anew at each sync because its rows differ. None: changes are
            rounded to bfloat16 and summed by an all-reduce, and rounding errors are lost.

    Attributes:
        rows: int32 [n], ascending, the same on every replica.
        residual: [n, d], this replica's; an owner's, too, as its share of the replicas' sum.
    """

    rows: Tensor
    residual: Tensor
    _keeps_base, _damaged = True, ""

    def __init__(
        self,
        weight: Tensor,
        group: dist.ProcessGroup,
        settings: Settings | None,
    ) -> None:
        super().__init__(weight, group)
        self._settings = settings
        self._start_anew(weight)

    def sync(self, weight: Tensor, state: Tensor | None, everything: bool) -> Tensor:
        self._require_intact()
        return super().sync(weight, state, everything)

    def _average(self, weight: Tensor, changed: Tensor, touched: _Rows, everything: bool) -> None:
        rows, base = touched
        union = torch.cat([self.rows, changed]).unique()
        moved = weight.new_zeros(len(union), weight.shape[1])
        moved[torch.searchsorted(union, self.rows)] = self.residual
        moved[torch.searchsorted(union, rows)] += weight[rows] - base
        weight[rows] = base
        if everything or self._settings is None:
            dtype = weight.dtype if everything else torch.bfloat16
            weight[union] += dense_mean(moved, dtype, self._group)
            self._start_anew(weight)
        elif len(union):
            residual = self._exchange(moved.view(-1), self._settings)
            weight[union] += moved
            self.rows, self.residual = union, residual.view_as(moved)
            self._syncs += 1

    def _start_anew(self, weight: Tensor) -> None:
        """With nothing pending, so that nothing needs saving."""
        # Not views, which would keep all of the memory.
        self.rows = torch.empty(0, dtype=torch.int32, device=weight.device)
        self.residual = weight.new_empty(0, weight.shape[1])
        self._syncs = 0  # since then: the seed of the threshold's sample

    def _exchange(self, moved: Tensor, settings: Settings) -> Tensor:
        """Replace `moved` [numel] by its mean over replicas; returns what this one has not sent."""
        plan = plan_bucket(["rows"], [moved.numel()], settings, self._group.size())
        bucket = Bucket(plan, self._group, moved.device, self._syncs, {})
        bucket.reduce(moved)
        self._damaged = "; ".join(StepResults({0: bucket}, run_now).read()[0].damaged)
        self._require_intact()
        pending = torch.zeros_like(moved)
        bucket.add_pending(pending)
        return pending

    def _require_intact(self) -> None:
        if self._damaged:
            got = f"{self._damaged}: go back to a checkpoint"
            checks.fail(_OP, "every payload", "intact", got, RuntimeError)


def _union(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The union of all replicas' `rows`: int32, ascending.

    Each replica sends 8 bytes to each, then 4 per row, padded to the largest number of them.
    """
    count = torch.tensor([len(rows)], device=rows.device)
    counts = count.new_empty(group.size(), 1)
    all_gather(counts, count, group)
    most = int(counts.max())
    if most == 0:
        return rows
    message = rows.new_full((most,), -1)
    message[: len(rows)] = rows
    everyones = message.new_empty(group.size(), most)
    all_gather(everyones, message, group)
    changed: Tensor = everyones[everyones >= 0].unique()
    return changed
