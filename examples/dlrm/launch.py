"""Starts the ranks: those torchrun gives, or local processes."""

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker

import torch
import torch.distributed as dist
from torch.multiprocessing import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from .command_line import on_ending_signals
from .errors import UsageError, WorkerError


def under_torchrun() -> bool:
    """Whether this process is one rank of several that were already started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Whether this process is rank 0 or starts it."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def launch(work: Callable[..., None], ranks: int, *args: object) -> None:
    """Call `work(*args)` on every rank, in a gloo process group.

    Under torchrun this process is one rank and `ranks` is ignored. Otherwise `ranks` local
    processes are started and waited for; `work` must then be importable and `args` picklable, and
    the environment is that of this process's first call.
    Each rank computes with cores / local ranks threads.

    Raises:
        WorkerError: a local rank failed. The others are ended, so a failure never hangs.
    """
    if under_torchrun():
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        if not is_first():
            on_ending_signals(signal.SIG_DFL)
        _join("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), local_ranks)
        work(*args)
        _leave()
        return
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        _prepare(work)
        with _interrupts_held():
            context = _start(ranks, rendezvous, work, args)
        try:
            _wait(context)
        finally:
            _end(context)


def _prepare(work: Callable[..., None]) -> None:
    """Start the process that ranks are forked from, and wait until it has imported what they need.

    That is once, not once a rank, and for all calls of this program. It takes seconds, in which
    Ctrl-C is answered here at once: no rank is there yet, and the process ends with this one.
    """
    # DDP's constructor imports dynamo.
    multiprocessing.set_forkserver_preload([work.__module__, "torch._dynamo"])
    resource_tracker.ensure_running()  # or the next line does, and lets signals through again
    with _interrupts_held():
        forkserver.ensure_running()
    first = multiprocessing.get_context("forkserver").Process(target=_nothing)
    first.start()
    first.join()


def _nothing() -> None:
    """The work of a process that is started to see that others can be."""


def _start(ranks: int, rendezvous: str, work: Callable[..., None], args: tuple) -> ProcessContext:
    given = (ranks, rendezvous, work, args)
    return start_processes(_local_rank, given, ranks, join=False, start_method="forkserver")


def _wait(context: ProcessContext) -> None:
    # Which would say which processes it ends, before the one that failed has its word.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    try:
        while not context.join():
            pass
    except ProcessRaisedException as error:
        raise WorkerError(_message(error)) from None
    except ProcessExitedException as error:
        raise WorkerError(f"rank {error.error_index} failed: {error.msg}") from None


def _end(context: ProcessContext) -> None:
    """Ranks that still run, where this process was interrupted."""
    for process in context.processes:
        process.kill()
        process.join()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C comes later: here afterwards, in ranks started meanwhile when they are ready for it.

    Until then each would answer it with a traceback of what it was importing.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _local_rank(
    rank: int, ranks: int, rendezvous: str, work: Callable[..., None], args: tuple
) -> None:
    # Collections pass over what was imported: it stays, and its memory is shared with others.
    gc.freeze()
    on_ending_signals(signal.SIG_DFL)  # at once and without a word: that is the first process's
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    _join(rendezvous, rank, ranks, ranks)
    work(*args)
    # Not in a `finally`: a failed rank that left the group first would make the others fail too,
    # and their message could hide the cause.
    _leave()


def _leave() -> None:
    """Leave the group and end its threads: one still at work as Python ends aborts the process."""
    # First what still holds the group, a model in a cycle with its hooks: the last holder joins the
    # threads, and garbage would do so with Python locked, which they may wait for.
    gc.collect()
    dist.destroy_process_group()


def _message(error: ProcessRaisedException) -> str:
    """What the user needs of a rank's traceback: all of it, unless the user is at fault."""
    last = error.msg.strip().splitlines()[-1]
    _, known, text = last.partition(f"{UsageError.__qualname__}: ")
    return text if known else f"rank {error.error_index} failed:\n{error.msg.strip()}"


def _join(rendezvous: str, rank: int, ranks: int, local_ranks: int) -> None:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // local_ranks))
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
