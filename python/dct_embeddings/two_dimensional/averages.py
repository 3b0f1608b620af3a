"""Averages the rows of a table that any replica changed since the last sync."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from dct_parallel.collectives import all_gather, dense_mean
from dct_parallel.exchange.bucket import Bucket
from dct_parallel.exchange.ledger import StepLedger
from dct_parallel.exchange.plan import plan_bucket
from dct_parallel.exchange.settings import Settings
from dct_parallel.load_hooks import LoadWatcher

_OP = "ReplicaSync"
_Rows = tuple[Tensor, Tensor]  # the result of `TouchedRows.take`


class TouchedRows:
    """Collects the distinct rows that were added since the last `take`.

    The time of a call depends on the number of collected rows, not on the size of the table.

    Args:
        weight: the table [rows, d]. This object stores one byte per row.
        keep: whether to keep the values that rows have when they are first added.
    """

    def __init__(self, weight: Tensor, keep: bool) -> None:
        self._known = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        self._keep = keep
        self._rows: list[Tensor] = []
        self._before: list[Tensor] = []

    def add(self, rows: Tensor, weight: Tensor) -> None:
        """Add `rows` [n]. With `keep`, also keep the values of the new rows among them.

        The host waits for the device, because the number of new rows depends on the data.
        """
        distinct = rows.unique()
        new = distinct[~self._known[distinct]]
        self._known[new] = True
        self._rows.append(new)
        if self._keep:
            self._before.append(weight[new])

    def read_again(self, weight: Tensor) -> None:
        """Keep the current values of all collected rows."""
        self._before = [weight[rows] for rows in self._rows]

    def take(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows in any order, int32 [n], and the kept values, [n, d] or [0, d]."""
        rows = torch.cat([self._known.new_empty(0, dtype=torch.int32), *self._rows])
        before = torch.cat([weight[:0], *self._before])
        self._known[rows] = False
        self._rows, self._before = [], []
        return rows, before


class Average:
    """Averages rows of a weight [rows, d] over all replicas, uncompressed.

    Attributes:
        touched: the rows that the optimizer of this replica has changed.
    """

    _keeps_base = False  # whether `touched` keeps the values of the last sync

    def __init__(self, weight: Tensor, group: dist.ProcessGroup) -> None:
        self.touched = TouchedRows(weight, self._keeps_base)
        self._group = group

    def sync(self, weight: Tensor, state: Tensor | None, everything: bool) -> Tensor:
        """Average in place. Return the rows that any replica changed.

        Args:
            state: the optimizer's state [rows], which is averaged uncompressed.
            everything: whether to send all changes uncompressed, so that no residual remains.
        """
        touched = self.touched.take(weight)
        changed = _union(touched[0], self._group)
        self._average(weight, changed, touched, everything)
        if state is not None:
            state[changed] = dense_mean(state[changed], state.dtype, self._group)
        return changed

    def _average(self, weight: Tensor, changed: Tensor, touched: _Rows, everything: bool) -> None:
        """Average the rows `changed`. This replica changed the rows in `touched`."""
        weight[changed] = dense_mean(weight[changed], weight.dtype, self._group)


class MeanOfChanges(Average, LoadWatcher):
    """Adds the mean of all changes to the weights of the last sync, with error feedback.

    Unsent changes are removed from the weights and kept in `residual`. Rows with a residual are
    part of every sync until a sync sends everything.

    Args:
        settings: the settings of the buckets. Each sync creates a bucket, because syncs differ in
            their rows. None: changes are rounded to bfloat16 and averaged, without a residual.

    Attributes:
        rows: int32 [n], ascending, the rows with a residual; the same on every replica.
        residual: [n, d], the residual of this replica, including the residual of its own range.
    """

    rows: Tensor
    residual: Tensor
    _keeps_base = True

    def __init__(self, weight: Tensor, group: dist.ProcessGroup, settings: Settings | None) -> None:
        super().__init__(weight, group)
        self._settings, self._ledger = settings, StepLedger(_OP, unit="sync")
        self._reset(weight)

    def sync(self, weight: Tensor, state: Tensor | None, everything: bool) -> Tensor:
        self._ledger.read()  # raises if an earlier sync failed
        return super().sync(weight, state, everything)

    def after_load(self, parameter: Parameter) -> None:
        """Continue from a table that was loaded, without the changes before."""
        self.touched.read_again(parameter.detach())
        self._reset(parameter.detach())

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
            self._reset(weight)
        elif len(union):
            residual = self._exchange(moved.view(-1), self._settings)
            weight[union] += moved
            self.rows, self.residual = union, residual.view_as(moved)

    def _reset(self, weight: Tensor) -> None:
        """Drop the residual."""
        # New tensors, because views would keep the whole storage alive.
        self.rows = torch.empty(0, dtype=torch.int32, device=weight.device)
        self.residual = weight.new_empty(0, weight.shape[1])
        self._ledger.restart(0)  # syncs since the reset are the seed of samples

    def _exchange(self, moved: Tensor, settings: Settings) -> Tensor:
        """Replace `moved` [numel] by its mean over replicas. Return this replica's residual."""
        plan = plan_bucket(["rows"], [moved.numel()], settings, self._group.size())
        bucket = Bucket(plan, self._group, moved.device, self._ledger.step, {})
        self._ledger.begin()
        self._ledger.record("the changed rows", bucket)
        bucket.reduce(moved)
        self._ledger.finish()
        self._ledger.resume(self._ledger.step)  # releases the bucket
        pending = torch.zeros_like(moved)
        bucket.add_pending(pending)
        return pending


def _union(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the union of all replicas' `rows`: int32, ascending.

    Each replica sends 8 bytes to each other replica, then 4 bytes per row of the replica with the
    most rows.
    """
    count = torch.tensor([len(rows)], dtype=torch.int64, device=rows.device)
    counts = count.new_empty(group.size(), 1)
    all_gather(counts, count, group)
    most = int(counts.max())
    if most == 0:
        return rows
    message = rows.new_full((most,), -1)
    message[: len(rows)] = rows
    received = message.new_empty(group.size(), most)
    all_gather(received, message, group)
    changed: Tensor = received[received >= 0].unique()
    return changed
