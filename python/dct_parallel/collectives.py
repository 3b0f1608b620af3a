"""How many bytes a rank sends in a collective, by formula: rings, as gloo and NCCL have them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(
    output: Tensor, tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """Every rank's `tensor` [n] into `output` [P, n], in rank order; a Work, if asynchronous."""
    # One collective, two names: from torch 2.13 the older warns, before it the newer is missing.
    newer = hasattr(dist, "all_gather_single")
    collective = dist.all_gather_single if newer else dist.all_gather_into_tensor
    return collective(output.view(-1), tensor, group=group, async_op=async_op)


def all_to_all(
    tensor: Tensor, splits: Sequence[int], output_splits: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Slices of the first dimension: splits[r] go to rank r, output_splits[r] come from it."""
    received = tensor.new_empty(sum(output_splits), *tensor.shape[1:])
    sent = tensor.contiguous()
    dist.all_to_all_single(received, sent, list(output_splits), list(splits), group=group)
    return received


def reduce_scatter(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """This rank's part of the sum of every rank's `tensor` [P * n], into `output` [n]."""
    # Two names, like all_gather.
    if hasattr(dist, "reduce_scatter_single"):
        dist.reduce_scatter_single(output, tensor, group=group)
    else:
        dist.reduce_scatter_tensor(output, tensor, group=group)


def on_any(said: bool, device: torch.device, *groups: dist.ProcessGroup) -> bool:
    """Whether any rank of these groups, a grid's rows and columns, says so. 8 bytes per group."""
    flag = torch.tensor([int(said)], dtype=torch.int64, device=device)
    for group in groups:
        dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    return bool(flag)


def dense_mean(tensor: Tensor, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """The mean of every rank's `tensor`, sent and returned in `dtype`; the same on every rank.

    Divided before it is summed, as DDP does: half as likely to overflow.
    """
    mean = tensor.to(dtype, copy=True).div_(group.size())
    dist.all_reduce(mean, group=group)
    return mean


def all_reduce_bytes(nbytes: int, world_size: int) -> int:
    """Bytes each rank sends in a ring all-reduce of `nbytes`: reduce-scatter, then all-gather."""
    return 2 * (world_size - 1) * nbytes // world_size


def all_gather_bytes(nbytes: int, world_size: int) -> int:
    """Bytes each rank sends in an all-gather to which it contributes `nbytes`."""
    return (world_size - 1) * nbytes
