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

import torch
import torch.distributed as dist

from dct_kernels import checks

from .groups import timeout_of

POLL_SECONDS = 0.02  # a wait in the store would keep other threads of this process from it


def named(ranks: Iterable[int | str]) -> str:
    """Ranks as errors name them."""
    numbers = list(map(str, ranks))
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


class PeerError(RuntimeError):
    """A different rank cannot, or does not, take part; the text names it and says why."""


class Agreement:
    """Rounds of `exchange`, one after another, in which all ranks of a group take part.

    A round ends once, and alike for every rank. It succeeds when all ranks have told their values.
    It fails as soon as one of them cannot take part (`refusing`), or gives up waiting for others.
    Then all may try again, at once: values of a failed round are never read later.

    - A refusal fails one attempt of every rank, however late the rank is: all ranks make the same
      number of attempts.
    - Ranks for which others gave up waiting go on to the next round, which the others join when
      they try again. A rank that tries again while others still wait for it joins them.
    - So a rank that failed without a word, in an attempt that a different rank refused, hears of
      that refusal the next time, and takes part the time after.

    The store holds the round of each rank: no rank relies on having counted like the others.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._own = dist.get_rank()
        self._store = dist.PrefixStore("dct/agreement", group.get_group_store())

    def exchange(
        self, op: str, values: Mapping[str, Any], timeout: timedelta
    ) -> dict[int, dict[str, Any]]:
        """{rank: its values}, in the group's order, once every rank has told its own.

        Args:
            op: the operation of the ranks, for errors; the same on all.
            values: of types that JSON can hold.
            timeout: how long to wait for the others.

        Raises:
            PeerError: some rank refused, or told nothing before the timeout of a different one; on
                every rank that takes part, naming that rank.
            ValueError: ranks are at different ops; on all of them, naming every rank's.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        end: dict[str, Any] = {"missing": [self._own]}
        while self._own in end.get("missing", []):  # others gave up before this rank came
            end = self._take_part(self._enter(), op, values, timeout, deadline)
        if "error" in end:
            raise PeerError(end["error"])
        told = {int(rank): entry for rank, entry in end["told"].items()}
        if len({entry["op"] for entry in told.values()}) > 1:
            got = ", ".join(f"{entry['op']} on rank {rank}" for rank, entry in told.items())
            checks.fail(op, "every rank", "the same", got, verb="do")
        return {rank: entry["values"] for rank, entry in told.items()}

    def refuse(self, op: str, error: Exception) -> None:
        """Take no part in the round of an `exchange`, which fails at once on the others."""
        number = self._enter()
        # If they gave up before, the refusal is for those that wait by now.
        while self._own in self._end(number).get("missing", []) and self._begun(number + 1):
            number = self._enter()
        self._close(number, {"error": self._refusal(op, error)})

    def waiting(self, op: str) -> list[int]:
        """The ranks in a round of `op` that this rank has not entered."""
        told = self._told(self._store.add(f"entered/{self._own}", 0) + 1)
        return [rank for rank, entry in told.items() if entry["op"] == op]

    def _enter(self) -> int:
        """The next round of this rank."""
        return self._store.add(f"entered/{self._own}", 1)

    def _begun(self, number: int) -> bool:
        return self._store.check([f"{number}/arrived"])

    def _take_part(
        self, number: int, op: str, values: Mapping[str, Any], timeout: timedelta, deadline: float
    ) -> dict[str, Any]:
        """How the round ends for all."""
        try:
            self._store.set(f"{number}/{self._own}", json.dumps({"op": op, "values": values}))
            if self._store.add(f"{number}/arrived", 1) == len(self._ranks):
                self._close(number, {"told": self._told(number)})
            while not (end := self._end(number)):
                if time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
                    continue
                told = self._told(number)
                if missing := self._but(told):
                    got = f"nothing from {named(missing)}: see the output there"
                    rule = f"do the same within {timeout.total_seconds():g} s"
                    error = f"dct::{op}: every rank must {rule}, got {got}"
                    self._close(number, {"missing": missing, "error": error})
                else:
                    self._close(number, {"told": told})
        except BaseException as stopped:  # as by Ctrl-C: the others need not wait any longer
            with contextlib.suppress(RuntimeError):
                missing = self._but(self._told(number))
                self._close(number, {"missing": missing, "error": self._refusal(op, stopped)})
            raise
        return end

    def _refusal(self, op: str, error: BaseException) -> str:
        if isinstance(error, PeerError):  # of a different group: the same rank is to blame
            return str(error)
        got = f"{type(error).__name__} from rank {self._own}: {error}".removesuffix(": ")
        return f"dct::{op}: every rank must take part, got {got}"

    def _told(self, number: int) -> dict[int, dict[str, Any]]:
        """The values that ranks have told in a round by now."""
        keys = {rank: f"{number}/{rank}" for rank in self._ranks}
        came = [rank for rank, key in keys.items() if self._store.check([key])]
        return {rank: json.loads(self._store.get(keys[rank])) for rank in came}

    def _but(self, told: dict[int, dict[str, Any]]) -> list[int]:
        return [rank for rank in self._ranks if rank not in told]

    def _close(self, number: int, end: dict[str, Any]) -> None:
        """End a round like this, unless it has ended."""
        self._store.compare_set(f"{number}/end", "", json.dumps(end))

    def _end(self, number: int) -> dict[str, Any]:
        """How a round ended; empty while it goes on."""
        key = f"{number}/end"
        return json.loads(self._store.get(key)) if self._store.check([key]) else {}


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
                    Agreement(group).refuse(op, error)
        raise


def require_alike(
    op: str, values: Mapping[str, object], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise, naming every rank's, if some of `values` is not the same on all; on all of them.

    Collective, and only for set-up. Values are compared as texts and may be invalid, so a rank with
    a wrong one does not leave the others waiting.
    """
    told = {name: str(value) for name, value in values.items()}
    require_same(op, Agreement(group).exchange(op, told, timeout_of(group, device)))


def require_same(op: str, told: Mapping[Any, Mapping[str, Any]]) -> None:
    """Raise, naming every rank's, if some value differs between ranks: on all of them alike."""
    for name in next(iter(told.values())):
        if len({json.dumps(values.get(name)) for values in told.values()}) > 1:
            got = ", ".join(f"{values.get(name)} on rank {rank}" for rank, values in told.items())
            checks.fail(op, name, "the same on every rank", got)
