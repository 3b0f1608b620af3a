"""Partial results of all ranks, added up; differentiable."""

from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from dct_parallel.collectives import all_gather
from dct_parallel.groups import GroupForBackward
from dct_parallel.rows.transfer import Transfer, with_gradient


def reduce_scatter(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of their partial results for this rank's samples.

    Summed in rank order, so that a run repeats bit for bit; a ring sends as many bytes. The
    gradient is gathered from all ranks and divided by their number, for a mean over ranks.

    Args:
        partial: [P * batch, m], for the samples of rank 0, 1, ...

    Returns:
        [batch, m].
    """
    return _ReduceScatter(group).start(partial).wait()


def all_reduce(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of their partial results [batch, m] for the same samples on all of them.

    Its gradient, the same on every rank as well, is that of each rank's part: nothing is sent.
    """
    return with_gradient(partial, lambda own: _sum(own, group), lambda grad: grad)


def with_summed_gradient(parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`parameter`, which is the same on every rank; its gradient is the sum of the ranks' parts."""
    held = GroupForBackward(group)
    return with_gradient(
        parameter, lambda own: own.view_as(own), lambda grad: _sum(grad, held.get())
    )


class _ReduceScatter(Transfer):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._ranks = group.size()

    def _send(self, x: Tensor) -> None:
        splits = [len(x) // self._ranks] * self._ranks
        self._all_to_all(x.contiguous(), splits, splits)

    def _receive(self) -> Tensor:
        return reduce(torch.add, self._arrived().chunk(self._ranks))

    def _send_gradient(self, grad: Tensor) -> None:
        everyone = grad.new_empty(self._ranks, grad.numel())
        flat = grad.contiguous().view(-1)
        work = all_gather(everyone, flat, self._group.get(), async_op=True)
        self._in_flight = work, everyone.view(-1, grad.shape[1])

    def _receive_gradient(self) -> Tensor:
        return self._arrived() / self._ranks


def _sum(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = own.clone()
    dist.all_reduce(total, group=group)
    return total
