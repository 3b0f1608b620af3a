"""Values of every rank of a group, compared through the group's store.

Not by a collective: ranks that disagree about a message's size hang in it, or abort without naming
the cause. The store answers whatever the ranks do, so all of them can say what is wrong.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from dct_kernels import checks

from .patience import ANSWER_SECONDS, STOPPED, within

POLL_SECONDS = 0.02  # a wait in the store would keep other threads of this process from it
_Answer = TypeVar("_Answer")


def named(ranks: Iterable[int | str]) -> str:
    """Ranks as errors name them."""
    numbers = list(map(str, ranks))
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


class PeerError(RuntimeError):
    """A different rank cannot, or does not, take part; the text names it and says why."""


class _NoAnswer(PeerError):
    """The store does not answer, so that no rank can be told either."""


class _Round:
    """One comparison: the n-th of this rank in its group is the n-th of every other rank.

    A rank that cannot take part tells the reason instead of its values. So where all ranks fail
    alike, they can try again. Where only some fail, numbers could differ from then on: the group is
    marked as broken, and every later comparison in it fails at once.

    Waits end at the timeout, and half a second later where the store's host is stopped.
    """

    def __init__(self, op: str, group: dist.ProcessGroup, timeout: float = 0) -> None:
        self._op, self._timeout = op, timeout
        self._deadline = time.monotonic() + timeout
        self._ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
        self._store = store = dist.PrefixStore("dct/agreement", group.get_group_store())
        number = self._ask(lambda: store.add(f"rounds/{own}", 1))
        self._keys = {rank: f"{number}/{rank}" for rank in self._ranks}
        self._own, self._arrived, self._end = self._keys[own], f"{number}/arrived", f"{number}/end"

    def refuse(self, error: BaseException) -> None:
        """End the round on all ranks with this rank's error."""
        self._set_once(self._end, _refusal(self._op, error))

    def exchange(self, values: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """{rank: {"op": its op, "values": its values}}, once every rank has told its own."""
        self._require_whole()
        try:
            self._ask(lambda: self._tell(json.dumps({"op": self._op, "values": values})))
            self._wait()
        except _NoAnswer:
            raise
        except BaseException as error:  # as by Ctrl-C: the others need not wait any longer
            with contextlib.suppress(RuntimeError):  # of a store that is gone
                self._set_once("broken", _refusal(self._op, error))
            raise
        told = self._ask(lambda: [self._store.get(key) for key in self._keys.values()])
        return dict(zip(self._keys, map(json.loads, told), strict=True))

    def _tell(self, own: str) -> None:
        self._store.set(self._own, own)
        if self._store.add(self._arrived, 1) == len(self._ranks):
            self._store.compare_set(self._end, "", "all")

    def _wait(self) -> None:
        while not self._has(self._end):
            self._require_whole()
            if time.monotonic() > self._deadline:
                missing = [rank for rank, key in self._keys.items() if not self._has(key)]
                if missing:
                    got = f"nothing from {named(missing)}: see the output there"
                    raise PeerError(self._late(got))
                self._set_once(self._end, "all")  # one has told, and counted late
            time.sleep(POLL_SECONDS)
        reason = self._ask(lambda: self._store.get(self._end)).decode()
        if reason != "all":
            raise PeerError(reason)

    def _require_whole(self) -> None:
        if self._has("broken"):
            reason = self._ask(lambda: self._store.get("broken")).decode()
            raise PeerError(f"{reason}; restart the process on every rank")

    def _has(self, key: str) -> bool:
        return self._ask(lambda: self._store.check([key]))

    def _set_once(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.compare_set(key, "", value))

    def _ask(self, call: Callable[[], _Answer]) -> _Answer:
        try:
            return within(max(self._deadline - time.monotonic(), ANSWER_SECONDS), call)
        except TimeoutError:
            raise _NoAnswer(self._late(f"no answer: {STOPPED}")) from None

    def _late(self, got: str) -> str:
        rule = f"do the same within {self._timeout:g} s"
        return f"dct::{self._op}: every rank must {rule}, got {got}"


def _refusal(op: str, error: BaseException) -> str:
    if isinstance(error, PeerError):  # the rank that it names is to blame
        return str(error)
    got = f"{type(error).__name__} from rank {dist.get_rank()}: {error}".removesuffix(": ")
    return f"dct::{op}: every rank must take part, got {got}"


def exchange(
    op: str, values: Mapping[str, Any], group: dist.ProcessGroup, timeout: timedelta
) -> dict[int, dict[str, Any]]:
    """{rank: its values}, in the group's order, once every rank has told its own.

    Args:
        op: the operation of the ranks, for errors; the same on all.
        values: of types that JSON can hold.
        timeout: how long to wait for the others.

    Raises:
        PeerError: a different rank refused, or told nothing before the timeout, as the text says,
            in this call or an earlier one. After it this group compares nothing any more.
        ValueError: ranks are at different ops; on all of them, naming every rank's.
    """
    told = _Round(op, group, timeout.total_seconds()).exchange(values)
    if len({entry["op"] for entry in told.values()}) > 1:
        got = ", ".join(f"{entry['op']} on rank {rank}" for rank, entry in told.items())
        checks.fail(op, "every rank", "the same", got, verb="do")
    return {rank: entry["values"] for rank, entry in told.items()}


@contextlib.contextmanager
def refusing(op: str, *groups: dist.ProcessGroup | None) -> Iterator[None]:
    """Tell the other ranks of these groups of an error inside, so that they raise instead of wait.

    It belongs around the checks of each rank's arguments, which precede an `exchange` in each of
    these groups.

    Args:
        op: the operation of the ranks, for errors.
        groups: anything but a process group is ignored; then the others wait until the timeout.
    """
    try:
        yield
    except _NoAnswer:
        raise
    except Exception as error:
        with contextlib.suppress(Exception):  # of a group that is gone; this error matters more
            for group in groups:
                if isinstance(group, dist.ProcessGroup):
                    _Round(op, group).refuse(error)
        raise


def require_same(op: str, told: Mapping[Any, Mapping[str, Any]]) -> None:
    """Raise, naming every rank's, if some value differs between ranks: on all of them alike."""
    for name in next(iter(told.values())):
        if len({json.dumps(values.get(name)) for values in told.values()}) > 1:
            got = ", ".join(f"{values.get(name)} on rank {rank}" for rank, values in told.items())
            checks.fail(op, name, "the same on every rank", got)
