"""Differentiable sums of partial results over ranks."""

from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from dct_parallel.groups import GroupForBackward
from dct_parallel.rows.transfer import (
    Receive,
    Transfer,
    start_all_gather,
    start_all_to_all,
    with_gradient,
)

_OP = "EquivalentSubstitution"


def reduce_scatter(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the partial results of all ranks for this rank's samples.

    The sum is in rank order, so results are deterministic. Each rank sends as many bytes as in a
    ring reduce-scatter. Gradients are gathered from all ranks and divided by the number of ranks.

    Args:
        partial: [P * batch, m], m numbers per sample, for the samples of rank 0, 1, ...

    Returns:
        [batch, m].
    """
    ranks, held = group.size(), GroupForBackward(group)

    def send(x: Tensor) -> Receive:
        splits = [len(x) // ranks] * ranks
        receive = start_all_to_all(x.contiguous(), splits, splits, held)
        return lambda: reduce(torch.add, receive().chunk(ranks))

    def send_gradient(grad: Tensor) -> Receive:
        receive = start_all_gather(grad.flatten(), held)
        return lambda: receive().view(-1, grad.shape[1]) / ranks

    return Transfer(_OP, partial, send, send_gradient).wait()


def all_reduce(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the partial results [batch, m] of all ranks for the same samples.

    The gradient of the sum is the same on every rank, and it is the gradient of each partial
    result. So the backward pass sends nothing.
    """
    return with_gradient(_OP, partial, lambda x: _sum(x, group), lambda grad: grad)


def with_summed_gradient(parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `parameter`, which is the same on every rank. Its gradient is summed over ranks."""
    held = GroupForBackward(group)
    return with_gradient(
        _OP, parameter, lambda x: x.view_as(x), lambda grad: _sum(grad, held.get())
    )


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total
