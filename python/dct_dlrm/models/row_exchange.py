"""How pooled embeddings get from the ranks that own tables to those that own samples."""

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dct_parallel import all_to_all_rows
from dct_parallel.groups import GroupForBackward

# (x [rows to all ranks, width], ordered by destination; how many go to each rank; how many come
# from each; group) -> rows [from all ranks, width], ordered by source. Differentiable, collective.
Exchange = Callable[[Tensor, Sequence[int], Sequence[int], dist.ProcessGroup], Tensor]


def whole_rows(dtype: torch.dtype) -> Exchange:
    """Every entry crosses, in `dtype`, and so does its gradient."""

    def exchange(
        x: Tensor, splits: Sequence[int], output_splits: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        return AllToAll.apply(x.to(dtype), splits, output_splits, group).to(x.dtype)

    return exchange


def largest_entries(density: float, value_dtype: torch.dtype = torch.bfloat16) -> Exchange:
    """DCT-MP: of a row its largest entries cross, and their gradients, in `value_dtype`."""

    def exchange(
        x: Tensor, splits: Sequence[int], output_splits: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        return all_to_all_rows(
            x, splits, output_splits, density=density, value_dtype=value_dtype, group=group
        )

    return exchange


class AllToAll(torch.autograd.Function):
    """torch.distributed.all_to_all_single, differentiable: gradients go back as they came."""

    @staticmethod
    def forward(ctx, x, splits, output_splits, group):
        ctx.splits, ctx.output_splits = splits, output_splits
        ctx.group = GroupForBackward(group)
        return all_to_all(x, splits, output_splits, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        group = ctx.group.get()
        return all_to_all(grad, ctx.output_splits, ctx.splits, group), None, None, None


def all_to_all(
    x: Tensor, splits: Sequence[int], output_splits: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Slices of the first dimension: splits[r] to rank r, output_splits[r] from it."""
    received = x.new_empty(sum(output_splits), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), list(output_splits), list(splits), group=group)
    return received


# By mode of the gradients' exchange: both use the same number format.
EXCHANGES: dict[str, Callable[[argparse.Namespace], Exchange]] = {
    "dense": lambda options: whole_rows(torch.float32),
    "bf16": lambda options: whole_rows(torch.bfloat16),
    "powersgd": lambda options: whole_rows(torch.float32),
    "dct": lambda options: largest_entries(options.mp_density),
}
