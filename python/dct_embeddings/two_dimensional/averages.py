"""Averages over replicas of a table, of the rows that changed since the last sync.

Each replica changed rows of its own. Their union is averaged, the rows that some replica changed.
For that every replica sends the numbers of its rows: 4 bytes per row.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

import dct_kernels  # noqa: F401  (registers torch.ops.dct)
from dct_kernels import checks
from dct_kernels.layout import payload_layout
from dct_parallel.collectives import all_gather, dense_mean
from dct_parallel.compressor import default_capacity

from .touched_rows import TouchedRows

_OP = "ReplicaSync"
_SAMPLES = 65536
_SEED = 0  # picks at the same places every time, because different rows are there


class Average:
    """The rows changed in training, and their average at a sync.

    Its tensors are always the same: the table's weight [rows, d], and, if its optimizer has one, a
    state [rows]. Uncompressed here: the mean of all replicas' rows of each, in its own dtype.
    """

    _based = 0  # the first so many of them keep a base: changed rows as of the last sync

    def __init__(self, weight: Tensor, group: dist.ProcessGroup) -> None:
        self._touched = TouchedRows(len(weight), weight.device)
        self._group = group

    def touch(self, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        """Note that the optimizer is about to change these rows [n] of `tensors`."""
        self._touched.add(rows, *tensors[: self._based])

    def sync(self, tensors: Sequence[Tensor], everything: bool) -> Tensor:
        """Average in place, leaving no residual if `everything`; returns the rows that changed."""
        rows, _ = self._touched.take()
        union, _ = _union(rows[:0], rows, self._group)
        _average(tensors, union, self._group)
        return union


class MeanOfRoundedDeltas(Average):
    """Base + the mean of replicas' changes, rounded to 16 bits; state uncompressed.

    Rounding errors are lost.
    """

    _based = 1

    def __init__(self, weight: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__(weight, group)
        self._dtype = dtype

    def sync(self, tensors: Sequence[Tensor], everything: bool) -> Tensor:
        weight, *state = tensors
        rows, (base,) = self._touched.take(weight)
        union, _ = _union(rows[:0], rows, self._group)
        delta = weight.new_zeros(len(union), weight.shape[1])
        _move_delta(weight, rows, base, delta, union)
        weight[union] += dense_mean(delta, self._dtype, self._group).to(weight.dtype)
        _average(state, union, self._group)
        return union


class MeanOfLargestDeltas(Average):
    """Base + the mean of the largest entries of replicas' changes: DCT with error feedback.

    The rest leaves the weights and stays in `residual`, for `rows`: those that some replica changed
    since there was no residual. They take part in every sync until `everything` is sent, so only
    numbers of further rows are sent.

    The state is never thresholded: a row with a delayed accumulator would take far too large steps.
    Its delta is sparse by itself, one number per row touched since the last sync, and is sent as it
    is, in float32. Such deltas are sums of squares, so an accumulator never falls.

    Args:
        bounds: the start of each shard in `weight`, and the end: each has a threshold of its own.

    Attributes:
        rows: int32 [n], ascending, the same on every replica.
        residual: float32 [n, d], this replica's.
    """

    _based = 2

    def __init__(
        self, weight: Tensor, group: dist.ProcessGroup, density: float, bounds: Sequence[int]
    ) -> None:
        super().__init__(weight, group)
        self._density = density
        self._bounds = torch.tensor(bounds, dtype=torch.int32, device=weight.device)
        self.rows = torch.empty(0, dtype=torch.int32, device=weight.device)
        self.residual = weight.detach().new_zeros(0, weight.shape[1])

    def sync(self, tensors: Sequence[Tensor], everything: bool) -> Tensor:
        rows, (base, *bases) = self._touched.take(*tensors)
        weight, *states = tensors
        union, most = _union(self.rows, rows, self._group)
        residual = self.residual.new_zeros(len(union), weight.shape[1])
        residual[torch.searchsorted(union, self.rows)] = self.residual
        _move_delta(weight, rows, base, residual, union)
        if everything:
            mean = dense_mean(residual, residual.dtype, self._group)
            # Not views, which would keep all of the memory.
            self.rows, self.residual = union.new_empty(0), residual.new_empty(0, residual.shape[1])
        else:
            mean = self._mean_of_largest(residual, union)
            self.rows, self.residual = union, residual
        weight[union] += mean
        for state, base in zip(states, bases, strict=True):
            delta = state.new_zeros(len(union))
            _move_delta(state, rows, base, delta, union)
            state[union] += self._mean_of_all(delta, most)
        return union

    def _mean_of_largest(self, residual: Tensor, union: Tensor) -> Tensor:
        flat, width = residual.view(-1), residual.shape[1]
        segments = torch.searchsorted(union, self._bounds) * width
        threshold = torch.ops.dct.sample_threshold(
            flat, None, segments, self._density, _SAMPLES, _SEED
        )
        # Every segment sends at least one entry.
        capacity = min(default_capacity(flat.numel(), self._density) + len(threshold), flat.numel())
        mean = _mean_of_payloads(
            flat, segments, threshold, max(capacity, 1), torch.bfloat16, self._group
        )
        return mean.view_as(residual)

    def _mean_of_all(self, delta: Tensor, most: int) -> Tensor:
        """The mean of `delta`, of which at most `most` entries are not 0 on each replica."""
        segments = torch.tensor([0, delta.numel()], device=delta.device)
        threshold = delta.new_zeros(1)
        return _mean_of_payloads(
            delta, segments, threshold, max(most, 1), torch.float32, self._group
        )


def _union(waiting: Tensor, rows: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """The union of `waiting`, the same on every replica, and all `rows`: int32, ascending.

    Also the largest number of `rows` on any replica. Each replica sends 16 bytes to each, then 4
    for each of its `rows` outside of `waiting`, padded to the largest number of these.
    """
    place = torch.searchsorted(waiting, rows).clamp(max=max(len(waiting) - 1, 0))
    own = rows[waiting[place] != rows] if len(waiting) else rows
    told = torch.tensor([len(own), len(rows)], device=rows.device)
    heard = told.new_empty(group.size(), 2)
    all_gather(heard, told, group)
    further, touched = heard.max(0).values.tolist()
    if further == 0:
        return waiting, touched
    message = rows.new_full((further,), -1)
    message[: len(own)] = own
    everyones = message.new_empty(group.size(), further)
    all_gather(everyones, message, group)
    return torch.cat([waiting, everyones[everyones >= 0]]).unique(), touched


def _average(tensors: Sequence[Tensor], rows: Tensor, group: dist.ProcessGroup) -> None:
    for tensor in tensors:
        tensor[rows] = dense_mean(tensor[rows], tensor.dtype, group)


def _move_delta(tensor: Tensor, rows: Tensor, base: Tensor, delta: Tensor, union: Tensor) -> None:
    """Add the change of `rows` of `tensor` since `base` to `delta`, [union, ...]; restore them."""
    delta[torch.searchsorted(union, rows)] += tensor[rows] - base
    tensor[rows] = base


def _mean_of_payloads(
    residual: Tensor,
    segments: Tensor,
    threshold: Tensor,
    capacity: int,
    value_dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> Tensor:
    """The mean of the entries that pass on each replica, which leave its `residual` [n]."""
    nbytes = payload_layout(residual.numel(), capacity, value_dtype).nbytes
    payload = torch.zeros(nbytes, dtype=torch.uint8, device=residual.device)
    seen = torch.empty(len(threshold), dtype=torch.int32, device=residual.device)
    torch.ops.dct.mask_pack(
        residual, None, segments, threshold, payload, seen, capacity, value_dtype
    )
    payloads = payload.new_empty(group.size(), nbytes)
    all_gather(payloads, payload, group)
    mean = torch.empty_like(residual)
    status = torch.ops.dct.scatter_unpack(payloads, mean, capacity, value_dtype, 1 / group.size())
    if damaged := {rank: code for rank, code in enumerate(status.tolist()) if code}:
        got = f"status {damaged} by replica: go back to a checkpoint"
        checks.fail(_OP, "every payload", "intact", got, RuntimeError)
    return mean
