"""Partial results of all ranks, added up; differentiable."""

from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..collectives import all_gather
from ..groups import GroupForBackward
from ..rows.transfer import Transfer


def reduce_scatter(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of their partial results for this rank's samples.

    Summed in rank order, so that a run repeats bit for bit; a ring sends as many bytes. The
    gradient is gathered from all ranks and divided by their number, as a mean over ranks is.

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
    total: Tensor = _AllReduce.apply(partial, group)  # type: ignore[no-untyped-call]
    return total


def with_summed_gradient(parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`parameter`, which is the same on every rank; its gradient is the sum of the ranks' parts."""
    summed: Tensor = _SummedGradient.apply(parameter, group)  # type: ignore[no-untyped-call]
    return summed


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
        self._in_flight(work, everyone.view(-1, grad.shape[1]))

    def _receive_gradient(self) -> Tensor:
        return self._arrived() / self._ranks


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = GroupForBackward(group)
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group.get())
        return total, None
