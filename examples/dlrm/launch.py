"""Runs a function on the ranks that torchrun started, or starts local ranks."""

import gc
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

from .errors import RankError, UsageError


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Whether this process is rank 0 or starts rank 0."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def launch(work: Callable[..., None], ranks: int, *args: object) -> None:
    """Call `work(*args)` on every rank, in a gloo process group.

    Under torchrun, this process is one rank and `ranks` is ignored. Otherwise, `ranks` local
    processes are started. `work` must be importable, and `args` must be picklable. The cores are
    divided equally between the threads of local ranks.

    Raises:
        UsageError: a local rank raised a UsageError.
        RankError: a local rank failed with another error. The other ranks are killed.
    """
    if under_torchrun():
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        _rank(rank, world_size, local_ranks, "env://", work, args)
        return
    # Ranks are forked from one process that has imported these modules. DDP imports dynamo.
    multiprocessing.set_forkserver_preload([work.__module__, "torch._dynamo"])
    # Otherwise torch logs that it ends processes, before the message of the failed rank.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, ranks, f"file://{folder}/rendezvous", work, args)
        context = start_processes(_rank, given, ranks, join=False, start_method="forkserver")
        try:
            while not context.join():
                pass
        except ProcessRaisedException as error:
            *_, last = error.msg.strip().splitlines()
            _, is_usage, text = last.partition(f"{UsageError.__qualname__}: ")
            if is_usage:
                raise UsageError(text) from None
            raise RankError(f"rank {error.error_index} failed:\n{error.msg.strip()}") from None
        except ProcessExitedException as error:
            raise RankError(f"rank {error.error_index} failed: {error.msg}") from None
        finally:
            for process in context.processes:  # processes are alive only after an interrupt
                process.kill()
                process.join()


def _rank(
    rank: int, ranks: int, local_ranks: int, rendezvous: str, work: Callable[..., None], args: tuple
) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    work(*args)
    # Not in a `finally`, because if a failed rank left the group, other ranks would also fail and
    # could hide the cause. First free models in reference cycles, because they use the group.
    gc.collect()
    dist.destroy_process_group()
