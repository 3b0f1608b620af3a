"""The process group "dct": invalid settings, ranks that differ, damage, ranks that are gone."""

import contextlib
import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dct_parallel import process_group
from dct_parallel.collectives import all_gather, reduce_scatter
from support.ranks import on_ranks, run_ranks

NUMEL = 2 * 16_384 + 1000  # on three ranks, an all-reduce has two collectives


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"format": "int5"}, ValueError, "format must be 'int8', 'int4' or 'bfloat16', got 'int5'"),
        ({"format": 8}, TypeError, "format must be a string or a torch.dtype, got 8"),
        ({"min_bytes": "1"}, TypeError, "min_bytes must be a number, got '1'"),
        ({"min_bytes": -1}, ValueError, "min_bytes must be >= 0, got -1"),
        ({"min_bytes": float("nan")}, ValueError, "min_bytes must be >= 0, got nan"),
        ({"gathers": "int4"}, ValueError, "gathers must be None or 'int8', got 'int4'"),
        ({"groups": [0]}, TypeError, "groups must be a function of a tuple of ranks, or None, got"),
    ],
)
def test_invalid_settings_change_nothing(options, error, text):
    before = process_group._settings
    with pytest.raises(error, match=f"dct::process_group.configure: {text}"):
        process_group.configure(**options)
    assert process_group._settings is before


@on_ranks(2)
def test_settings_must_be_the_same_on_all_ranks(rank):
    """A group whose settings differ is not created, on any rank."""
    rule, groups = "must be the same on every rank, got", (None, lambda ranks: False)
    for options, text in (
        ({"format": ("int8", "int4")[rank]}, f"format {rule} int8 on rank 0, int4 on rank 1"),
        ({"min_bytes": 10 + rank}, f"min_bytes {rule} 10 on rank 0, 11 on rank 1"),
        ({"gathers": (None, "int8")[rank]}, f"gathers {rule} None on rank 0, int8 on rank 1"),
        ({"groups": groups[rank]}, f"compresses {rule} True on rank 0, False on rank 1"),
    ):
        process_group.configure(**options)
        with pytest.raises(ValueError, match=f"dct::init_process_group: {text}"):
            dist.new_group(backend="dct")


@on_ranks(3)
def test_damaged_message_raises_on_its_receiver(rank):
    """The error names the sender. The next call succeeds."""
    process_group.configure(min_bytes=1000, gathers="int8")
    group = dist.new_group(backend="dct")

    def damaging(collective):
        def damaged(output, *args, **options):
            if work := collective(output, *args, **options):
                work.wait()
            output.view(3, -1)[0, 0] ^= 255 * (rank == 1)
            return work

        return damaged

    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(NUMEL), group=group),
        "all_gather": lambda: all_gather(torch.empty(3 * NUMEL), torch.ones(NUMEL), group),
        "reduce_scatter": lambda: reduce_scatter(torch.empty(NUMEL), torch.ones(3 * NUMEL), group),
    }
    exchange = "dct_parallel.exchange"
    for name, place, collective, what in (
        ("all_reduce", f"{exchange}.reduce_scatter.all_gather", all_gather, ", of the mean"),
        ("all_gather", f"{exchange}.quantized_collectives.gather_messages", all_gather, ""),
        ("reduce_scatter", "torch.distributed.all_to_all_single", dist.all_to_all_single, ""),
    ):
        text = f"dct::{name}: every payload must be intact, got status 1 from rank 0{what}"
        raises = pytest.raises(RuntimeError, match=text) if rank == 1 else contextlib.nullcontext()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, damaging(collective))
            with raises:
                calls[name]()
            dist.barrier(group)
        calls[name]()


@on_ranks(2)
def test_failed_call_sets_the_work_and_its_future(rank):
    process_group.configure(min_bytes=1000)
    group = dist.new_group(backend="dct", timeout=timedelta(seconds=2))
    dist.all_reduce(torch.ones(NUMEL), group=group)
    if rank == 1:  # this rank does not call
        return
    work = dist.all_reduce(torch.ones(NUMEL), group=group, async_op=True)
    with pytest.raises(RuntimeError, match="the collective must be complete within 0"):
        work.wait(timedelta(seconds=0.1))
    assert not work.is_completed() and not work.is_success() and work.exception() is None
    for wait in (work.wait, work.get_future().wait):
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            wait()
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), RuntimeError)


@on_ranks(2)
def test_destroyed_groups_leave_nothing(rank):
    process_group.configure(min_bytes=1000)

    def resources():
        threads = [thread.name for thread in threading.enumerate()]
        return len(dist.distributed_c10d._world.pg_map), threads.count("dct")

    before = resources()
    group = dist.new_group(backend="dct")
    works = [dist.all_reduce(torch.ones(NUMEL), group=group, async_op=True) for _ in range(4)]
    assert resources() == (before[0] + 2, before[1] + 1)
    dist.destroy_process_group(group)
    assert all(work.wait() for work in works)
    assert resources() == before


def _survivor(rank):
    model = DistributedDataParallel(torch.nn.Linear(512, 600))  # 1.2 MB
    for _ in range(2):  # in the second step, DDP broadcasts the order of its buckets
        model(torch.ones(1, 512)).sum().backward()
    assert process_group.stats()["all_reduce"]["calls"] == 2
    if rank == 1:
        os._exit(7)
    model(torch.ones(1, 512)).sum().backward()


def test_surviving_rank_raises_after_another_exits():
    """DDP raises the error of the exchange in `backward`."""
    with pytest.raises(RuntimeError, match=r"exit codes \[1, 7\](.|\n)*RuntimeError.*peer"):
        run_ranks(_survivor, 2, backend="dct")
