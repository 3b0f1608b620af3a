"""Executors, which run bucket jobs during the backward pass, in the order of submission.

The order keeps ranks together: every rank submits the same jobs in the same order, so it issues the
same collectives in the same order. Callbacks of futures would not do: gloo runs them on threads of
its own, in the order of arrival, which differs between ranks, so a collective issued there hangs.
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

EXIT_SECONDS = 5  # to finish; if it takes longer, other ranks are gone
_Jobs = queue.SimpleQueue[tuple[Start, Any, Future[Any]] | None]  # None: the end


class Executor(ABC):
    """Runs jobs in the order of submission, without gradients."""

    @abstractmethod
    def submit(self, start: Start, result: _Result) -> Future[_Result]:
        """A future of `result` once the job is complete, or of the exception that it raises."""

    def submit_after(self, call: Complete) -> Future[None]:
        """Call this once all earlier jobs are complete."""
        self.complete()
        return self.submit(call, None)

    def complete(self) -> None:  # noqa: B027  # by default nothing
        """Complete the jobs that only their submitter can complete."""

    @abstractmethod
    def close(self) -> object:
        """End; no job is submitted after it."""


class InlineExecutor(Executor):
    """The thread of the backward pass: for CPU tensors whose exchange is one collective.

    A job starts when it is submitted, and its message is sent during the backward pass. `complete`
    completes the jobs, in order. A thread of its own would contend for Python's lock.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[Complete, Any, Future[Any]]] = []

    def submit(self, start: Start, result: _Result) -> Future[_Result]:
        done: Future[_Result] = Future()
        with below_autograd():
            complete = start()
        if complete is None:
            done.set_result(result)
        else:
            self._under_way.append((complete, result, done))
        return done

    def complete(self) -> None:
        under_way, self._under_way = self._under_way, []
        with below_autograd():
            for complete, result, done in under_way:
                complete()
                done.set_result(result)

    def close(self) -> None:
        """Drop the jobs of a backward pass that raised; no other leaves any."""
        self._under_way = []


class ThreadExecutor(Executor):
    """One thread, first in first out: for CPU tensors whose exchange is several collectives.

    Only a thread can start the second collective of a bucket during the backward pass, in the same
    order on every rank. `close()` ends the thread once its jobs are done; Python's exit calls it at
    the latest.
    """

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        # A daemon: a rank whose peers are gone must be able to exit from within a collective.
        thread = threading.Thread(target=_serve, args=(self._jobs,), name="dct", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _stop, self._jobs, thread)  # also at exit

    def submit(self, start: Start, result: _Result) -> Future[_Result]:
        done: Future[_Result] = Future()
        # DDP reads the future in C++, which knows an exception for one only from a callback.
        value = done.then(Future.value)
        self._jobs.put((start, result, done))
        return value

    def close(self) -> None:
        self._end()


class StreamExecutor(Executor):
    """A CUDA stream, to which the submitting thread queues jobs.

    Waiting for the future of a job makes the current stream wait for this one.
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
        """Do nothing: the stream is torch's."""


def executor_for(device: torch.device, sends_once: bool) -> Executor:
    """The executor for tensors on this device. `sends_once`: whether a job is one collective."""
    if device.type == "cuda":
        return StreamExecutor(device)
    return InlineExecutor() if sends_once else ThreadExecutor()


def _stop(jobs: _Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    # Python kills daemons as it exits, and the process aborts if one is in C++ just then, handing
    # its last future to DDP. The thread itself may collect the executor: it cannot wait for itself.
    if thread is not threading.current_thread():
        thread.join(EXIT_SECONDS)


def _serve(jobs: _Jobs) -> None:
    with torch.no_grad(), below_autograd():
        while (item := jobs.get()) is not None:
            _run(*item)
            del item  # an idle thread must not keep the last job's tensors, nor its executor, alive


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
