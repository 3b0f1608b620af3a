"""Calls of torch that may never return, and how long to wait for them."""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

ANSWER_SECONDS = 0.5  # to wait for an answer that nobody delays, past a deadline
STOPPED = "the host of the store, rank 0 or torchrun, is stopped"
_Result = TypeVar("_Result")


def within(seconds: float, call: Callable[[], _Result]) -> _Result:
    """The result of `call`, or its error, made on a thread of its own.

    A process group's store is asked over a socket, and torch's waits for the answer have no timeout
    where the store's host is stopped. The thread is left behind then: it waits on.

    Raises:
        TimeoutError: there is none after so many seconds.
    """
    answers: queue.SimpleQueue[tuple[list[_Result], Exception | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(([call()], None))
        except Exception as error:
            answers.put(([], error))

    threading.Thread(target=ask, name="dct-asks", daemon=True).start()
    try:
        result, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result[0]
