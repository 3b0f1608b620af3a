"""Each distinct row of a batch once: samples share rows, above all those of small tables."""

import torch
from torch import Tensor

from dct_parallel.rows.transfer import with_gradient


def distinct(ids: Tensor, tables: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct ids of every table.

    Args:
        ids: int32 [...], 0 and up.
        tables: int64 [...] or broadcast to that, the table of each id, 0 to `number` - 1.
        number: number of tables.

    Returns:
        wanted int32 [n], table by table, ascending in each; inverse int64 [...], the index of each
        id in `wanted`; counts int64 [number], ids in `wanted` per table.
    """
    keys, inverse = torch.unique(ids + (tables << 32), return_inverse=True)
    counts = torch.bincount(keys >> 32, minlength=number)
    return (keys & 0xFFFFFFFF).int(), inverse, counts


def repeat(rows: Tensor, inverse: Tensor) -> Tensor:
    """rows[inverse], [..., d]; gradients of rows used several times are summed in sample order.

    Summed in float32 (float64 for float64), in the order of `inverse`, on any device, so that equal
    batches give equal bits. A row of `rows` [n, d] that `inverse` does not contain has gradient 0.
    """
    flat, number = inverse.flatten(), len(rows)

    def backward(grad: Tensor) -> Tensor:
        uses = torch.bincount(flat, minlength=number)
        by_row = grad.flatten(0, -2).index_select(0, flat.argsort(stable=True))
        by_row = by_row.to(torch.promote_types(grad.dtype, torch.float32))
        summed = torch.segment_reduce(by_row, "sum", lengths=uses, initial=0.0, unsafe=True)
        return summed.to(grad.dtype)

    def forward(rows: Tensor) -> Tensor:
        return rows.index_select(0, flat).view(*inverse.shape, rows.shape[1])

    return with_gradient("ShardedEmbeddingBags", rows, forward, backward)
