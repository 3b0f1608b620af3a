"""Rank processes that run many programs, because startup takes longer than a program."""

import contextlib
import gc
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from support import forked

TIMEOUT = timedelta(seconds=60)  # of collectives, long enough for busy machines
SECONDS = 240  # time limit of a call
GRACE = 2  # seconds until other ranks count as hung after one has failed


class Failed(Exception):
    """A rank raised, exited or hung. The message contains the rank and its traceback."""


class Pool:
    """`ranks` gloo processes, which are replaced after a call that failed.

    Use it in a `with` statement, which ends the processes.
    """

    def __init__(self, ranks):
        self._ranks = ranks
        self._processes, self._pipes = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._end()

    def call(self, function, *args, seconds=SECONDS):
        """Return [function(rank, *args) for each rank]. On a failure, end all and raise Failed."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the process has ended; `recv` reports it
                pipe.send((function, args))
        results, texts = {}, []
        deadline = time.monotonic() + seconds
        while len(results) < self._ranks:
            missing = {self._pipes[r]: r for r in range(self._ranks) if r not in results}
            ready = wait(missing, timeout=max(0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = missing[pipe]
                try:
                    results[rank], error = pipe.recv()
                except (EOFError, OSError):
                    results[rank], error = None, "ended"
                if error:
                    texts.append(f"rank {rank}: {error}")
                    deadline = min(deadline, time.monotonic() + GRACE)
        hung = [rank for rank in range(self._ranks) if rank not in results]
        if hung or texts:
            self._end()
            texts += [f"rank {rank} did not return" for rank in hung]
            raise Failed("\n".join(texts))
        return [results[rank] for rank in range(self._ranks)]

    def _start(self):
        forked.start()
        self._folder = tempfile.TemporaryDirectory()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = store
        for rank in range(self._ranks):
            pipe, child_pipe = forked.context.Pipe()
            args = rank, self._ranks, store.port, child_pipe, self._folder.name
            process = forked.context.Process(target=_serve, args=args, daemon=True)
            process.start()
            child_pipe.close()
            self._processes.append(process)
            self._pipes.append(pipe)

    def _end(self):
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._pipes = [], []


def _serve(rank, ranks, port, pipe, folder):
    gc.freeze()  # imported modules are never collected
    tempfile.tempdir = folder  # removed by the pool
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    warnings.simplefilter("error")
    # Programs drop some steps with NaN or Inf without a call of take_back.
    warnings.filterwarnings("ignore", "DCT: gradients had NaN or Inf in a step that no optimizer")
    warnings.filterwarnings("ignore", "DCT: the state was saved with")
    while True:
        function, args = pipe.recv()
        try:
            result = function(rank, *args), None
        except BaseException:
            result = None, traceback.format_exc()
        gc.collect()  # releases the models of this program
        pipe.send(result)
