"""Ranks that are started, watched, hit by signals and ended: each is a process and a session.

They are forked from a process that has imported what they need (forked.py), and end as Python does.
"""

import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch
from forked import start_process

from .traces import Traces
from .trainings import Job

LINES = 15  # of what a rank printed last


class Mark(NamedTuple):
    name: str
    time: float  # of time.monotonic(): one clock for all processes


class Ranks:
    """The ranks of one run.

    Args:
        program: what each calls, with its job.
        jobs: one for each.
        folder: a new one, for what they print and their temporary files.

    Attributes:
        marks: of each rank, as far as they were read.
        ends: when each ended, or None.
        traces: of them all.
    """

    def __init__(self, program: Callable[[Job], None], jobs: list[Job], folder: Path) -> None:
        temporary = folder / "temporary"
        temporary.mkdir(parents=True)
        self._folder = folder
        self._processes, self._pipes = [], []
        self.marks: list[list[Mark]] = [[] for _ in jobs]
        self.ends: list[float | None] = [None] * len(jobs)
        for job in jobs:
            ours, theirs = Pipe(duplex=False)
            self._processes.append(start_process(_rank, program, job, theirs, folder))
            self._pipes.append(ours)
            theirs.close()
        self.traces = Traces([process.pid for process in self._processes], temporary)

    def watch(self, until: Callable[[], object], seconds: float) -> bool:
        """Note marks and ends until something is so; False if it was not in that time."""
        deadline = time.monotonic() + seconds
        while not until():
            left = deadline - time.monotonic()
            running = [p for p, end in zip(self._pipes, self.ends, strict=True) if end is None]
            if left <= 0 or not running:
                return False
            wait(running, left)
            self.read()
        return True

    def read(self) -> None:
        """Note what there is to note, without waiting."""
        for rank, pipe in enumerate(self._pipes):
            while self.ends[rank] is None and pipe.poll():
                try:
                    self.marks[rank].append(Mark(*pipe.recv()))
                except EOFError:  # the rank closed its end, as it ended
                    self.ends[rank] = time.monotonic()

    def left(self, rank: int) -> float | None:
        """When it had nothing more to wait for, as it ended; or None."""
        return next((m.time for m in self.marks[rank] if m.name == "left"), self.ends[rank])

    def waits_since(self, rank: int) -> float:
        """The last that it began to do."""
        return max((m.time for m in self.marks[rank] if m.name != "left"), default=0.0)

    def signal(self, rank: int, number: int) -> None:
        # A process that has not been waited for keeps its number.
        os.kill(self._processes[rank].pid, number)

    def end(self) -> list[int]:
        """Kill those that are left; exit codes of all."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self.read()
        for pipe in self._pipes:
            pipe.close()
        return [process.exitcode for process in self._processes]

    def printed(self, rank: int) -> str:
        """The end of it, for errors."""
        log = self._folder / f"{rank}.log"
        text = log.read_text() if log.exists() else ""
        # As Python ends, a library of triton tells what it still holds: see gc.freeze below.
        return "\n".join(text.partition("nanobind: leaked")[0].splitlines()[-LINES:])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _rank(program: Callable[[Job], None], job: Job, pipe: Connection, folder: Path) -> None:
    gc.freeze()  # collections pass over what was imported
    os.setsid()
    log = os.open(folder / f"{job.rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started us may ignore it
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where one is that is late
    tempfile.tempdir = str(folder / "temporary")
    os.environ["TMPDIR"] = tempfile.tempdir
    torch.set_num_threads(1)
    job.mark = lambda name: pipe.send((name, time.monotonic()))
    # The first that is made is the last that is called: then the waits of others are over, and what
    # is left to do is Python's.
    weakref.finalize(job, job.mark, "left")
    code = 0
    try:
        program(job)
    except BaseException as error:
        sys.last_value = error  # as Python keeps what nobody caught, and all its frames
        traceback.print_exc()
        code = 1
    # As a script ends, and not as multiprocessing ends its children: finalizers, threads and the
    # destructors of C++ count. It takes a second of what was imported; other tests have what ends
    # without an error.
    if code:
        ctypes.pythonapi.Py_Exit(code)
