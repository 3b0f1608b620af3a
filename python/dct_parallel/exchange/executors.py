"""Executors, which reduce buckets during the backward pass, in the order of submission.

Every rank submits the same buckets in the same order, so all ranks issue the same collectives in
the same order. Callbacks of futures do not guarantee this order, because gloo runs callbacks on its
own threads in the order in which collectives complete. The order of completion differs between
ranks, so a collective in a callback can hang.
"""

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from .._torch import below_autograd
from .ledger import Step

EXIT_SECONDS = 5  # after which the other ranks are assumed to be gone


class Reduction(Protocol):
    """Replaces gradients by their mean over all ranks, in two calls. See `Bucket`."""

    def start(self, buffer: Tensor, inv_scale: Tensor | None) -> None: ...

    def finish(self, out: Tensor, scale: Tensor | None) -> None: ...


class Executor(ABC):
    """Reduces buckets in the order of submission, without gradients."""

    @abstractmethod
    def submit(self, reduction: Reduction, buffer: Tensor, step: Step) -> Future[Tensor]:
        """Return a future of `buffer`, which then holds the mean, or of an exception."""

    @abstractmethod
    def run_after(self, call: Callable[[], Any]) -> Future[Any] | None:
        """Run `call` after all earlier reductions. Returns a future, or None if it has run."""

    def complete(self) -> None:  # noqa: B027  # not abstract
        """Finish the reductions that need the submitting thread. By default there are none."""

    def close(self) -> object:  # noqa: B027  # not abstract
        """Stop the executor. No bucket may be submitted afterwards. By default, nothing stops."""


class InlineExecutor(Executor):
    """Reduces buckets with CPU tensors on the thread of the backward pass.

    A reduction starts when it is submitted, and its message is sent during the backward pass.
    `complete` finishes the reductions in order, including the collectives that `finish` starts. No
    separate thread is used, because it would contend for the GIL.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Reduction, Tensor, Step, Future[Tensor]]] = []

    def submit(self, reduction: Reduction, buffer: Tensor, step: Step) -> Future[Tensor]:
        done: Future[Tensor] = Future()
        with below_autograd():
            reduction.start(buffer, step.inv_scale)
        self._pending.append((reduction, buffer, step, done))
        return done

    def run_after(self, call: Callable[[], Any]) -> None:
        self.complete()
        with below_autograd():
            call()

    def complete(self) -> None:
        pending, self._pending = self._pending, []
        with below_autograd():
            for reduction, buffer, step, done in pending:
                reduction.finish(buffer, step.scale)
                done.set_result(buffer)

    def close(self) -> None:
        """Drop pending reductions. There are none unless a backward pass raised an error."""
        self._pending = []


class ThreadExecutor(Executor):
    """Reduces buckets with CPU tensors and several collectives each, on a separate thread.

    Only a separate thread can start the second collective of a bucket during the backward pass, in
    the same order on every rank. `close()` ends the thread after its last call, as does the garbage
    collection of the executor. Python's exit also ends the thread.
    """

    def __init__(self) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        # A daemon, so that a rank can exit while a collective blocks because other ranks are gone.
        thread = threading.Thread(target=_serve, args=(self._calls,), name="dct", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _stop, self._calls, thread)  # also at exit

    def submit(self, reduction: Reduction, buffer: Tensor, step: Step) -> Future[Tensor]:
        return self._put(_reduce, reduction, buffer, step)

    def run_after(self, call: Callable[[], Any]) -> Future[Any] | None:
        if self._end.alive:
            return self._put(call)
        call()  # the executor is closed
        return None

    def _put(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        # DDP reads the future in C++. The C++ code recognizes an exception only if a callback
        # raised it.
        value = done.then(Future.value)
        self._calls.put((call, arguments, done))
        return value

    def close(self) -> None:
        self._end()


class StreamExecutor(Executor):
    """Queues reductions on two CUDA streams, on the submitting thread.

    One stream packs and the other one unpacks, so the next bucket is packed while a bucket is in
    the network. With "reduce_scatter", only packing overlaps, because NCCL runs the collectives of
    a group in order. A future makes the stream that waits for it wait for the unpacking stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # High priority, because short kernels should not queue behind those of the backward pass.
        self._packing, self._unpacking = (torch.cuda.Stream(device, priority=-1) for _ in range(2))

    def submit(self, reduction: Reduction, buffer: Tensor, step: Step) -> Future[Tensor]:
        # The current stream computes the gradients.
        self._packing.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._packing), torch.no_grad(), below_autograd():
            reduction.start(buffer, step.inv_scale)
        return self._after_packing(_finish, reduction, buffer, step)

    def run_after(self, call: Callable[[], Any]) -> Future[Any]:
        done = self._after_packing(call)
        # `call` copies the headers to the host, and the next step overwrites all messages.
        self._packing.wait_stream(self._unpacking)
        return done

    def _after_packing(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        # Collectives order only what they send. The headers that are copied to the host, dense
        # means, and the parts of a node are written while packing. `take_back`, which clears
        # headers, waits for the future of the copy, and so for both streams.
        self._unpacking.wait_stream(self._packing)
        done: Future[Any] = Future(devices=[self._device])
        with torch.cuda.stream(self._unpacking), torch.no_grad(), below_autograd():
            done.set_result(call(*arguments))
        return done


def executor_for(device: torch.device, sends_once: bool) -> Executor:
    """Return an executor for this device. `sends_once`: whether a bucket has one collective."""
    if device.type == "cuda":
        return StreamExecutor(device)
    return InlineExecutor() if sends_once else ThreadExecutor()


def _stop(calls: "_Calls", thread: threading.Thread) -> None:
    calls.put(None)
    # Python kills daemon threads at exit. If the thread is setting its last future in C++ at that
    # time, the process aborts, so join the thread. The garbage collector may run this function on
    # the thread itself, where join() would raise an error.
    if thread is not threading.current_thread():
        thread.join(EXIT_SECONDS)


def _serve(calls: "_Calls") -> None:
    with torch.no_grad(), below_autograd():
        while (item := calls.get()) is not None:
            _run(*item)
            del item  # an idle thread must not keep the last tensors or the executor alive


def _run(call: Callable[..., Any], arguments: tuple[Any, ...], done: Future[Any]) -> None:
    try:
        result = call(*arguments)
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(result)


def _reduce(reduction: Reduction, buffer: Tensor, step: Step) -> Tensor:
    reduction.start(buffer, step.inv_scale)
    return _finish(reduction, buffer, step)


def _finish(reduction: Reduction, buffer: Tensor, step: Step) -> Tensor:
    reduction.finish(buffer, step.scale)
    return buffer


# (call, its arguments, a future of its result). None ends the thread.
_Calls = queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], Future[Any]] | None]
