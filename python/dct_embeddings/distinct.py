"""Deduplication: finds the distinct rows of a batch, and repeats them for its samples."""

import torch
from torch import Tensor

from dct_parallel.rows.transfer import with_gradient


def distinct(ids: Tensor, tables: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct ids of every table.

    Args:
        ids: int32 [...], at least 0.
        tables: int64 [...] or broadcastable to it, the table of each id, from 0 to `number` - 1.
        number: number of tables.

    Returns:
        wanted int32 [n], table by table and ascending in each table; inverse int64 [...], the index
        of each id in `wanted`; counts int64 [number], the number of ids in `wanted` per table.
    """
    keys, inverse = torch.unique(ids + (tables << 32), return_inverse=True)
    return (keys & 0xFFFFFFFF).int(), inverse, count(keys >> 32, number)


def count(numbers: Tensor, end: int) -> Tensor:
    """Return how often each number from 0 to `end` - 1 occurs. torch.bincount would synchronize."""
    counts = torch.zeros(end, dtype=torch.int64, device=numbers.device)
    return counts.scatter_add_(0, numbers, torch.ones_like(numbers))


def repeat(rows: Tensor, inverse: Tensor) -> Tensor:
    """Return rows[inverse] [..., d], for `rows` [n, d].

    The gradients of a repeated row are summed in float32 (float64 for float64) in the order of
    `inverse` on any device, so equal batches give bitwise equal sums. Unused rows have gradient 0.
    """
    flat, number = inverse.flatten(), len(rows)

    def backward(grad: Tensor) -> Tensor:
        uses = count(flat, number)
        by_row = grad.flatten(0, -2).index_select(0, flat.argsort(stable=True))
        by_row = by_row.to(torch.promote_types(grad.dtype, torch.float32))
        summed = torch.segment_reduce(by_row, "sum", lengths=uses, initial=0.0, unsafe=True)
        return summed.to(grad.dtype)

    def forward(rows: Tensor) -> Tensor:
        return rows.index_select(0, flat).view(*inverse.shape, rows.shape[1])

    return with_gradient("ShardedEmbeddingBags", rows, forward, backward)
