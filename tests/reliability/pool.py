"""Rank processes that live on from one program to the next: a start costs more than a program."""

import contextlib
import gc
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import wait

import forked
import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)  # of collectives: machines may be busy
SECONDS = 240  # for a call
GRACE = 2  # for the others once a rank has failed


class Failed(Exception):
    """A rank raised, died or hung; the text says which, and with what."""


class Pool:
    """`ranks` gloo processes; after a call that failed they are new ones.

    With `with`, which ends them.
    """

    def __init__(self, ranks):
        self._ranks = ranks
        self._processes, self._pipes = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._end()

    def call(self, function, *args, seconds=SECONDS):
        """[function(rank, *args) of each]; raises Failed, once all processes have ended."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has ended, as `recv` will say
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
            pipe, theirs = forked.context.Pipe()
            args = rank, self._ranks, store.port, theirs, self._folder.name
            process = forked.context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
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
    gc.freeze()  # what was imported stays
    tempfile.tempdir = folder  # of which nothing stays
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    warnings.simplefilter("error")
    while True:
        function, args = pipe.recv()
        try:
            result = function(rank, *args), None
        except BaseException:
            result = None, traceback.format_exc()
        gc.collect()  # models end before the next program's
        pipe.send(result)
