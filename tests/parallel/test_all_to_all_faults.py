"""all_to_all_rows where ranks disagree, err, die or stall: errors, no hangs."""

import gc
import os
import re
import weakref
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from dct_parallel import RowFormat, all_gather_rows, all_to_all_rows
from ranks import on_ranks, run_ranks

ALL = RowFormat(density=1.0)
HALF = RowFormat(density=0.5)


def _disagreeing(rank):
    """Every kind of disagreement, one after another: all ranks fail, and all can go on."""
    ranks, texts = dist.get_world_size(), []
    splits, last = [1] * ranks, rank == ranks - 1
    calls = [
        lambda: all_to_all_rows(torch.randn(ranks, 16 if last else 8), splits, format=HALF),
        lambda: all_to_all_rows(torch.randn(ranks, 0 if last else 8), splits, format=HALF),
        lambda: all_to_all_rows(
            torch.randn(ranks, 8), splits, format=RowFormat(density=0.5 if last else 0.25)
        ),
        lambda: all_to_all_rows(torch.randn(ranks, 8).to(_dtype(last)), splits, format=HALF),
        lambda: all_to_all_rows(torch.randn(ranks, 8, requires_grad=last), splits, format=HALF),
    ]
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        texts.append(str(error.value))
    all_to_all_rows(torch.randn(ranks, 8), splits, format=HALF)
    return texts


def _dtype(last):
    return torch.bfloat16 if last else torch.float32


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree_all_fail_and_name_all_values(world_size):
    texts = run_ranks(_disagreeing, world_size)
    assert texts == texts[:1] * world_size
    start = "dct::all_to_all_rows: "
    for text, name, first, last in zip(
        texts[0],
        ("d", "d", "density", "format", "requires_grad"),
        (8, 8, 0.25, "float32", False),
        (16, 0, 0.5, "bfloat16", True),
        strict=True,
    ):
        got = [f"{first} on rank {rank}" for rank in range(world_size - 1)]
        got.append(f"{last} on rank {world_size - 1}")
        assert text == f"{start}{name} must be the same on every rank, got {', '.join(got)}"


@on_ranks(1)
def test_errors_name_the_argument(rank):
    x = torch.randn(4, 8)
    for call, error, text in [
        (lambda: all_to_all_rows(x, [2, 2], format=ALL), ValueError, "splits must have 1 elements"),
        (lambda: all_to_all_rows(x, [3], format=ALL), ValueError, "x must have 3 rows like"),
        (lambda: all_to_all_rows(None, [4], format=ALL), TypeError, "x must be a tensor, got None"),
        (lambda: all_to_all_rows(x[0], [4], format=ALL), ValueError, "x must be 2-D, got 1-D"),
        (lambda: all_to_all_rows(x, [-4], format=ALL), ValueError, "splits[0] must be in [0, "),
        (lambda: all_to_all_rows(x, [4.0], format=ALL), TypeError, "splits[0] must be an integer"),
        (
            lambda: all_to_all_rows(x, [4], [1, 3], format=ALL),
            ValueError,
            "output_splits must have",
        ),
        (lambda: all_to_all_rows(x.double(), [4], format=ALL), TypeError, "x must be float32"),
        (
            lambda: all_to_all_rows(x, 4, format=ALL),
            TypeError,
            "splits must be a sequence of integ",
        ),
        (lambda: all_to_all_rows(x, [4], 4, format=ALL), TypeError, "output_splits must be a sequ"),
        *(
            (partial(all_to_all_rows, x[:, :0], [4], format=how), ValueError, "x must have at lea")
            for how in (ALL, "int8")
        ),
    ]:
        with pytest.raises(error, match=re.escape(text)):
            call()


def _dies(rank, when):
    x = torch.randn(2, 8, requires_grad=True)
    dist.barrier()  # who dies earlier is missed while the ranks still connect to each other
    if when == "forward" and rank == 1:
        os._exit(7)
    y = all_to_all_rows(x, [1, 1], format=HALF)
    if rank == 1:
        os._exit(7)
    y.sum().backward()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_dies_ends_the_others_with_an_error(when):
    # Not -9: the survivor ended by itself.
    with pytest.raises(
        RuntimeError, match=r"(?s)exit codes \[1, 7\].*(all_to_all_single|work.wait)"
    ):
        run_ranks(_dies, 2, when)


@on_ranks(1)
def test_a_graph_does_not_keep_its_group(rank):
    """Kept until the process exits, its threads would make that an abort."""
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


@on_ranks(2)
def test_a_rank_that_stalls_ends_the_others_at_the_timeout_of_the_group(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["given up"])  # alive, and never in the collective
        return
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
        all_to_all_rows(torch.randn(2, 8), [1, 1], format=HALF, group=group)
    store.set("given up", "")
