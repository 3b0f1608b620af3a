"""Collectives that several modules use, and the bytes that a rank sends for them in a ring."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(
    output: Tensor, tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """Gather every rank's `tensor` [n] into `output` [P, n]. Returns a Work if asynchronous."""
    # From torch 2.13 on, the old name warns. Before 2.13, the new name does not exist.
    newer = hasattr(dist, "all_gather_single")
    collective = dist.all_gather_single if newer else dist.all_gather_into_tensor
    return collective(output.view(-1), tensor, group=group, async_op=async_op)


def all_to_all(
    tensor: Tensor, splits: Sequence[int], output_splits: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Exchange rows: splits[r] rows go to rank r, output_splits[r] rows come from it."""
    received = tensor.new_empty(sum(output_splits), *tensor.shape[1:])
    sent = tensor.contiguous()
    dist.all_to_all_single(received, sent, list(output_splits), list(splits), group=group)
    return received


def reduce_scatter(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Write this rank's part of the sum of all ranks' `tensor` [P * n] into `output` [n]."""
    # As in all_gather, the old name warns from torch 2.13 on.
    newer = hasattr(dist, "reduce_scatter_single")
    collective = dist.reduce_scatter_single if newer else dist.reduce_scatter_tensor
    collective(output, tensor, group=group)


def any_rank(flag: bool, device: torch.device, *groups: dist.ProcessGroup) -> bool:
    """Whether `flag` is true on any rank. Pass one group per dimension of the grid of ranks."""
    result = torch.tensor([int(flag)], dtype=torch.int64, device=device)
    for group in groups:
        dist.all_reduce(result, dist.ReduceOp.MAX, group)
    return bool(result)


def dense_mean(tensor: Tensor, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
    """Return the mean of all ranks' `tensor`, sent and returned in `dtype`.

    Ranks divide before the sum, as DDP does, because the sum could overflow in float16.
    """
    mean = tensor.to(dtype, copy=True).div_(group.size())
    dist.all_reduce(mean, group=group)
    return mean


def all_reduce_bytes(nbytes: int, world_size: int) -> int:
    """Bytes that each rank sends in a ring all-reduce of `nbytes`."""
    return 2 * (world_size - 1) * nbytes // world_size


def all_gather_bytes(nbytes: int, world_size: int) -> int:
    """Bytes that each rank sends in a ring all-gather of `nbytes` per rank."""
    return (world_size - 1) * nbytes
