"""Values of every rank of a group, compared through the group's store.

Not by a collective: ranks that disagree about a message's size hang in it, or abort without naming
the cause. The store answers whatever the ranks do, so all of them can say what is wrong.
"""

import contextlib
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dct_kernels import checks


class GroupForBackward:
    """A process group as an autograd graph may hold it: weakly.

    A graph often lives until the process exits. A group that it kept alive would join its threads
    only then, when they can no longer enter Python, and the process aborts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    def get(self) -> dist.ProcessGroup:
        """The group; RuntimeError if it has been destroyed."""
        group = self._group()
        if group is None:
            text = (
                "the process group must exist until the backward pass is done, got a destroyed one"
            )
            raise RuntimeError(text)
        return group


def require_group(op: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, by default of all ranks; raise unless this rank is in it."""
    if group is None and not dist.is_initialized():
        rule = "a process group where torch.distributed is not initialized"
        checks.fail(op, "group", f"{rule} (call init_process_group first)", None)
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        checks.fail(op, "group", "a process group that this rank is in", repr(group))
    return group


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a collective of the group waits for other ranks, on this device."""
    return group._get_backend(device).options._timeout


def separate_group(group: dist.ProcessGroup, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of the same ranks, whose collectives are independent of those of `group`.

    All ranks of `group` call it, no others. Not by dist.new_group: that needs every rank of the
    world, or (use_local_synchronization) names the group after the number of this rank's groups,
    and ranks with different numbers hang. It makes no communicator for any backend but gloo,
    whatever `group` has.

    Args:
        name: the same on all ranks, and never used before with this `group`.
        timeout: of its collectives, and of making it.

    Raises:
        RuntimeError: some rank does not make it, or is stopped.
    """
    ranks = dist.get_process_group_ranks(group)
    seconds = timeout.total_seconds()

    def make() -> dist.ProcessGroup:
        made: dist.ProcessGroup
        made, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            group.rank(),
            ranks,
            "gloo",
            group.get_group_store(),
            f"{group.group_name}/dct/{name}",  # type: ignore[arg-type]  # its GroupName is a str
            timeout=timeout,
            group_desc="dct",
        )
        made.barrier().wait()  # a rank that ends it at once would break what others still connect
        return made

    try:
        made = within(seconds + ANSWER_SECONDS, make)
    except TimeoutError:
        rule = f"dct: every rank must make a process group within {seconds:g} s"
        raise RuntimeError(f"{rule}, got no answer: {STOPPED}") from None
    distributed_c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    return made


def ending(owner: object, *groups: dist.ProcessGroup) -> Callable[[], object]:
    """A function that destroys these `separate_group`s, once: called, or as `owner` is collected.

    No rank waits for another in it. `owner` is not kept alive, and may hold the groups. It is not
    called at exit, where collectives may be under way, nor does it mind groups that are destroyed.
    """
    end = weakref.finalize(owner, _destroy, groups)
    end.atexit = False
    return end


def _destroy(groups: Iterable[dist.ProcessGroup]) -> None:
    for group in groups:
        with contextlib.suppress(ValueError):  # if all groups have been destroyed
            dist.destroy_process_group(group)


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
