"""Executors of bucket jobs beside the backward pass, in the order of submission.

The order keeps ranks together: every rank submits the same jobs in the same order, so it issues the
same collectives in the same order. Callbacks of futures would not do: gloo runs them on threads of
its own, in the order of arrival, which differs between ranks, so a collective issued there hangs.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.futures import Future

_Result = TypeVar("_Result")
_Jobs = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]  # None: the end

EXIT_SECONDS = 5  # to finish; if it takes longer, its peers are gone


class ThreadExecutor:
    """One thread, first in first out: for CPU tensors, whose collectives block their caller.

    `close()` ends it once its jobs are done; Python's exit calls it at the latest.
    """

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        # A daemon: a rank whose peers are gone must be able to exit from within a collective.
        thread = threading.Thread(target=_serve, args=(self._jobs,), name="dct", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _stop, self._jobs, thread)  # also at exit

    def submit(self, job: Callable[[], _Result]) -> Future[_Result]:
        """A future of the job's result, or of the exception it raises."""
        done: Future[_Result] = Future()
        # DDP reads the future in C++, which knows an exception for one only from a callback.
        result = done.then(Future.value)
        self._jobs.put((job, done))
        return result


class StreamExecutor:
    """A CUDA stream. Its collectives return at once, so the submitting thread can queue them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, job: Callable[[], _Result]) -> Future[_Result]:
        """A future of the job's result: its wait makes the current stream wait for this one."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        done: Future[_Result] = Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            done.set_result(job())
        return done

    def close(self) -> None:
        """Nothing to end: the stream is torch's."""


Executor = ThreadExecutor | StreamExecutor


def executor_for(device: torch.device) -> Executor:
    """The executor for tensors on this device."""
    return StreamExecutor(device) if device.type == "cuda" else ThreadExecutor()


def _stop(jobs: _Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    # Python kills daemons as it exits, and the process aborts if one is in C++ just then, handing
    # its last future to DDP. The thread itself may collect the executor: it cannot wait for itself.
    if thread is not threading.current_thread():
        thread.join(EXIT_SECONDS)


def _serve(jobs: _Jobs) -> None:
    while (item := jobs.get()) is not None:
        _run(*item)
        del item  # an idle thread must not keep the last job's tensors, nor its executor, alive


def _run(job: Callable[[], _Result], done: Future[_Result]) -> None:
    try:
        result = job()
    except Exception as error:
        done.set_exception(error)  # type: ignore[arg-type]  # torch annotates it as a result
    else:
        done.set_result(result)
