"""How pooled embeddings get from the ranks that own tables to those that own samples."""

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dct_parallel import all_to_all_rows

# (x [rows to all ranks, width], ordered by destination; how many go to each rank; how many come
# from each; group) -> rows [from all ranks, width], ordered by source. Differentiable, collective.
Exchange = Callable[[Tensor, Sequence[int], Sequence[int], dist.ProcessGroup], Tensor]


def whole_rows(forward: str, backward: str) -> Exchange:
    """Every entry crosses, in a number format for each way: see `all_to_all_rows`."""

    def exchange(
        x: Tensor, splits: Sequence[int], output_splits: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        return all_to_all_rows(
            x, splits, output_splits, forward=forward, backward=backward, group=group
        )

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


def all_to_all(
    x: Tensor, splits: Sequence[int], output_splits: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Slices of the first dimension: splits[r] to rank r, output_splits[r] from it."""
    received = x.new_empty(sum(output_splits), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), list(output_splits), list(splits), group=group)
    return received


def _dct(options: argparse.Namespace) -> Exchange:
    if options.mp_format is not None:
        return whole_rows(*options.mp_format)
    return largest_entries(options.mp_density)


# By mode of the gradients' exchange: both use the same number format.
EXCHANGES: dict[str, Callable[[argparse.Namespace], Exchange]] = {
    "dense": lambda options: whole_rows("float32", "float32"),
    "bf16": lambda options: whole_rows("bfloat16", "bfloat16"),
    "powersgd": lambda options: whole_rows("float32", "float32"),
    "dct": _dct,
}
