"""Row exchanges raise and do not hang if ranks pass different arguments, fail, exit or stall."""

import gc
import re
import weakref

import pytest
import torch
import torch.distributed as dist

from dct_parallel import RowFormat, all_gather_rows, all_to_all_rows
from support.ranks import on_ranks

ALL = RowFormat(density=1.0)
HALF = RowFormat(density=0.5)


@on_ranks(3)
def test_different_arguments_raise_on_all_ranks(rank):
    """All ranks raise for each kind of difference, and the next call works."""
    last, x = rank == 2, torch.randn(3, 16)
    dtype, density = (torch.bfloat16, 0.5) if last else (torch.float32, 0.25)
    quantized = "int4" if last else RowFormat("int4", backward="sign")
    dense = "float32" if last else RowFormat(density=0.5)

    def all_to_all(x, format):
        return all_to_all_rows(x, [1, 1, 1], format=format)

    def all_gather(x, format):
        return all_gather_rows(x, format=format)

    both = (
        (x, quantized, "format", "int4, sign", "int4"),
        (x, dense, "density", 0.5, None),
        (x, RowFormat(density=density), "density", 0.25, 0.5),
        (x.to(dtype), HALF, "format", "float32", "bfloat16"),
        (x.clone().requires_grad_(last), HALF, "requires_grad", False, True),
    )
    widths = (
        (x[:, : 16 if last else 8], HALF, "d", 8, 16),
        (x[:, : 8 * (rank < 2)], HALF, "d", 8, 0),
    )
    for exchange, cases in (
        (all_to_all, both + widths),
        (all_gather, (*both, (x[: 3 * (rank < 2)], HALF, "B", 3, 0))),
    ):
        for given, format, name, first, second in cases:
            with pytest.raises(ValueError) as error:
                exchange(given, format)
            got = f"{first} on rank 0, {first} on rank 1, {second} on rank 2"
            rule = f"{name} must be the same on every rank, got {got}"
            assert str(error.value) == f"dct::{exchange.__name__}_rows: {rule}"
        exchange(x, HALF)
    with pytest.raises(ValueError, match=re.escape("widths[2] must be in [1, ")):
        all_gather(x[:, : 8 * (rank < 2)], HALF)


@on_ranks(1)
def test_errors_name_the_argument(rank):
    x = torch.randn(4, 8)
    for function, given, error, text in [
        (all_to_all_rows, (x, [2, 2]), ValueError, "splits must have 1 elements"),
        (all_to_all_rows, (x, [3]), ValueError, "x must have 3 rows like"),
        (all_to_all_rows, (x[0], [4]), ValueError, "x must be 2-D, got 1-D"),
        (all_to_all_rows, (x, [-4]), ValueError, "splits[0] must be in [0, "),
        (all_to_all_rows, (x, [4], [1, 3]), ValueError, "output_splits must have"),
        (all_to_all_rows, (x[:, :0], [4]), ValueError, "x must have at least 1 column"),
        (all_gather_rows, (x, [9]), ValueError, "x must have width 9 like widths, got 8"),
        (all_gather_rows, (x, [8, 8]), ValueError, "widths must have 1 elements"),
        (all_gather_rows, (x[:, :0],), ValueError, "widths[0] must be in [1, "),
    ]:
        for format in (ALL, "int8"):
            with pytest.raises(error, match=re.escape(text)):
                function(*given, format=format)


@on_ranks(1)
def test_autograd_graph_does_not_keep_its_group(rank):
    """If a group existed until the process exits, its threads would abort the process."""
    group = dist.new_group([0])
    x = torch.randn(3, 8, requires_grad=True)
    for exchange in (
        lambda group: all_to_all_rows(x, [3], format=HALF, group=group),
        lambda group: all_gather_rows(x, format=HALF, group=group),
    ):
        exchange(group).sum().backward()
    kept, y = weakref.ref(group), exchange(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert kept() is None
    with pytest.raises(RuntimeError, match="must exist until the backward pass"):
        y.sum().backward()
