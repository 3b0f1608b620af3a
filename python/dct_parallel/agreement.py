"""Values of every rank of a group, compared through the group's store.

Not by a collective: ranks that disagree about a message's size hang in it, or abort without naming
the cause. The store answers whatever the ranks do, so all of them can say what is wrong.
"""

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dct_kernels import checks

POLL_SECONDS = 0.02  # a wait in the store would keep other threads of this process from it


def named(ranks: Iterable[int | str]) -> str:
    """Ranks as errors name them."""
    numbers = list(map(str, ranks))
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


class PeerError(RuntimeError):
    """A different rank cannot, or does not, take part; the text names it and says why."""


class _Round:
    """One comparison: the n-th of this rank in its group is the n-th of every other rank.

    A rank that cannot take part tells the reason instead of its values. So where all ranks fail
    alike, they can try again. Where only some fail, numbers could differ from then on: the group is
    marked as broken, and every later comparison in it fails at once.

    Waits end at the timeout as long as the store's host answers: a call of the store has none.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
        self._store = dist.PrefixStore("dct/agreement", group.get_group_store())
        number = self._store.add(f"rounds/{own}", 1)
        self._keys = {rank: f"{number}/{rank}" for rank in self._ranks}
        self._own, self._arrived, self._end = self._keys[own], f"{number}/arrived", f"{number}/end"

    def refuse(self, op: str, error: BaseException) -> None:
        """End the round on all ranks with this rank's error."""
        self._store.compare_set(self._end, "", _refusal(op, error))

    def exchange(
        self, op: str, values: Mapping[str, Any], timeout: timedelta
    ) -> dict[int, dict[str, Any]]:
        """{rank: {"op": its op, "values": its values}}, once every rank has told its own."""
        self._require_whole()
        try:
            self._store.set(self._own, json.dumps({"op": op, "values": values}))
            if self._store.add(self._arrived, 1) == len(self._ranks):
                self._store.compare_set(self._end, "", "all")
            self._wait(op, timeout)
        except BaseException as error:  # as by Ctrl-C: the others need not wait any longer
            with contextlib.suppress(RuntimeError):  # of a store that is gone
                self._store.compare_set("broken", "", _refusal(op, error))
            raise
        return {rank: json.loads(self._store.get(key)) for rank, key in self._keys.items()}

    def _wait(self, op: str, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._store.check([self._end]):
            self._require_whole()
            if time.monotonic() > deadline:
                missing = [r for r, key in self._keys.items() if not self._store.check([key])]
                if missing:
                    rule = f"do the same within {timeout.total_seconds():g} s"
                    got = f"nothing from {named(missing)}: see the output there"
                    raise PeerError(f"dct::{op}: every rank must {rule}, got {got}")
                self._store.compare_set(self._end, "", "all")  # one has told, and counted late
            time.sleep(POLL_SECONDS)
        reason = self._store.get(self._end).decode()
        if reason != "all":
            raise PeerError(reason)

    def _require_whole(self) -> None:
        if self._store.check(["broken"]):
            reason = self._store.get("broken").decode()
            raise PeerError(f"{reason}; restart the process on every rank")


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
    told = _Round(group).exchange(op, values, timeout)
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
    except Exception as error:
        with contextlib.suppress(Exception):  # of a group that is gone; this error matters more
            for group in groups:
                if isinstance(group, dist.ProcessGroup):
                    _Round(group).refuse(op, error)
        raise


def require_same(op: str, told: Mapping[Any, Mapping[str, Any]]) -> None:
    """Raise, naming every rank's, if some value differs between ranks: on all of them alike."""
    for name in next(iter(told.values())):
        if len({json.dumps(values.get(name)) for values in told.values()}) > 1:
            got = ", ".join(f"{values.get(name)} on rank {rank}" for rank, values in told.items())
            checks.fail(op, name, "the same on every rank", got)
