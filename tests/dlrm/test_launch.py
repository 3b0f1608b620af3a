"""Starting ranks: a failure of one ends the others and arrives with its message."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from programs import started
from torch.nn.parallel import DistributedDataParallel as DDP

from dlrm.launch import WorkerError, launch
from ranks import hooked


def _sum_of_ranks(path, threads):
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    assert torch.get_num_threads() == threads
    if dist.get_rank() == 0:
        path.write_text(str(total.item()))


def _fail_on_rank_one(error):
    if dist.get_rank() == 1:
        raise error
    dist.barrier()  # rank 0 would wait here for ever


def _die_on_rank_one():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def _leave_a_thread_at_work():
    ddp, _ = hooked(DDP(torch.nn.Linear(64, 64)), start_step=1)
    ddp.cycle = [ddp]
    for _ in range(3):
        ddp(torch.ones(1, 64)).sum().backward()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.get_future().add_done_callback(lambda _: time.sleep(0.5))


def test_every_rank_works(tmp_path):
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    launch(_sum_of_ranks, 2, tmp_path / "total", threads)
    assert (tmp_path / "total").read_text() == "3"


def test_an_error_of_a_rank_arrives_with_its_traceback():
    with pytest.raises(WorkerError) as failure:
        launch(_fail_on_rank_one, 2, RuntimeError("no such luck"))
    text = str(failure.value)
    assert text.startswith("rank 1 failed:") and text.endswith("RuntimeError: no such luck")
    assert "_fail_on_rank_one" in text


def test_a_rank_that_dies_is_named():
    with pytest.raises(WorkerError, match="rank 1 failed: process 1 terminated with exit code 7"):
        launch(_die_on_rank_one, 2)


def test_a_thread_still_at_work_ends_before_python_does():
    launch(_leave_a_thread_at_work, 2)


# What ranks do, in a module that takes long to import where they are forked from, and there alone.
WORK = """
import pathlib, sys, time
if sys.argv[0] == "-c":
    pathlib.Path("importing").touch()
    time.sleep(300)
def work(): pass
"""
PROGRAM = """
import sys, work
from dlrm.command_line import exit_status
from dlrm.launch import launch
sys.exit(exit_status("program", lambda: launch(work.work, 2)))
"""


def test_an_interrupt_does_not_wait_for_what_ranks_import(tmp_path):
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with (
        open(tmp_path / "errors", "w") as errors,
        started(
            [sys.executable, "program.py"], cwd=tmp_path, stderr=errors, env=environment
        ) as process,
    ):
        while not (tmp_path / "importing").exists():
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # to all processes, as a terminal sends it
        assert process.wait(60) == 130
        assert (tmp_path / "errors").read_text() == "program: interrupted\n"
