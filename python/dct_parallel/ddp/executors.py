"""Executors, which run bucket jobs during the backward pass, in the order of submission.

Every rank submits the same jobs in the same order, so all ranks issue the same collectives in the
same order. Callbacks of futures do not guarantee this order, because gloo runs callbacks on its own
threads in the order in which collectives complete. The order of completion differs between ranks,
so a collective in a callback can hang.
"""

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch
from torch.futures import Future

from .._torch import below_autograd
from ..exchange.bucket import Complete, Start

_Result = TypeVar("_Result")

EXIT_SECONDS = 5  # after which the other ranks are assumed to be gone
_Jobs = queue.SimpleQueue[tuple[Start, Any, Future[Any]] | None]  # None ends the thread


class Executor(ABC):
    """Runs jobs in the order of submission, without gradients."""

    @abstractmethod
    def submit(self, start: Start, result: _Result) -> Future[_Result]:
        """Return a future that holds `result` once the job is complete, or the job's exception."""

    def submit_after(self, call: Complete) -> Future[None]:
        """Run `call` after all earlier jobs are complete."""
        self.complete()
        return self.submit(call, None)

    def complete(self) -> None:  # noqa: B027  # not abstract
        """Complete the pending jobs that need the submitting thread. By default there are none."""

    @abstractmethod
    def close(self) -> object:
        """Stop the executor. No job may be submitted afterwards."""


class InlineExecutor(Executor):
    """Runs jobs with CPU tensors and one collective each, on the thread of the backward pass.

    A job starts when it is submitted, and its message is sent during the backward pass. `complete`
    completes the jobs in order. No separate thread is used, because it would contend for the GIL.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Complete, Any, Future[Any]]] = []

    def submit(self, start: Start, result: _Result) -> Future[_Result]:
        done: Future[_Result] = Future()
        with below_autograd():
            complete = start()
        if complete is None:
            done.set_result(result)
        else:
            self._pending.append((complete, result, done))
        return done

    def complete(self) -> None:
        pending, self._pending = self._pending, []
        with below_autograd():
            for complete, result, done in pending:
                complete()
                done.set_result(result)

    def close(self) -> None:
        """Drop pending jobs. There are none unless a backward pass raised an error."""
        self._pending = []


class ThreadExecutor(Executor):
    """Runs jobs with CPU tensors and several collectives each, on a separate thread.

    Only a separate thread can start the second collective of a bucket during the backward pass, in
    the same order on every rank. `close()` ends the thread after its last job, as does the garbage
    collection of the executor. Python's exit also ends the thread.
    """

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        # A daemon, so that a rank can exit while a collective blocks because other ranks are gone.
        thread = threading.Thread(target=_serve, args=(self._jobs,), name="dct", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _stop, self._jobs, thread)  # also at exit

    def submit(self, start: Start, result: _Result) -> Future[_Result]:
        done: Future[_Result] = Future()
        # DDP reads the future in C++. The C++ code recognizes an exception only if a callback
        # raised it.
        value = done.then(Future.value)
        self._jobs.put((start, result, done))
        return value

    def close(self) -> None:
        self._end()


class StreamExecutor(Executor):
    """Queues jobs on a CUDA stream, on the submitting thread.

    Waiting for a job's future makes the current stream wait for the job's stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, start: Start, result: _Result) -> Future[_Result]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        done: Future[_Result] = Future(devices=[self._device])
        with torch.cuda.stream(self._stream), torch.no_grad(), below_autograd():
            _finish(start)
            done.set_result(result)
        return done

    def close(self) -> None:
        """Do nothing, because torch manages the stream."""


def executor_for(device: torch.device, sends_once: bool) -> Executor:
    """Return an executor for this device. `sends_once`: whether a job is one collective."""
    if device.type == "cuda":
        return StreamExecutor(device)
    return InlineExecutor() if sends_once else ThreadExecutor()


def _stop(jobs: _Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    # Python kills daemon threads at exit. If the thread is setting its last future in C++ at that
    # time, the process aborts, so join the thread. The garbage collector may run this function on
    # the thread itself, where join() would raise an error.
    if thread is not threading.current_thread():
        thread.join(EXIT_SECONDS)


def _serve(jobs: _Jobs) -> None:
    with torch.no_grad(), below_autograd():
        while (item := jobs.get()) is not None:
            _run(*item)
            del item  # an idle thread must not keep the last job's tensors or its executor alive


def _run(start: Start, result: Any, done: Future[Any]) -> None:
    try:
        _finish(start)
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(result)


def _finish(start: Start) -> None:
    complete = start()
    if complete is not None:
        complete()
