"""Process groups, and the comparison of values between their ranks.

Ranks compare values through the group's store before they exchange tensors. In a collective, ranks
that disagree about the size of a message hang, or abort with an error that hides the cause.
"""

import contextlib
import hashlib
import json
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import __version__, checks

from ._torch import new_group_like
from ._torch import timeout_of as timeout_of


class GroupForBackward:
    """A weak reference to a process group, for an autograd graph.

    A graph often lives until the process exits. If the graph kept the group alive, the group would
    join its threads at exit. The threads can no longer enter Python then, so the process would
    abort.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    def get(self) -> dist.ProcessGroup:
        """The group. Raises RuntimeError if it has been destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the process group must exist until the backward pass is done, got a destroyed one"
            )
        return group


def require_group(
    op: str, group: dist.ProcessGroup | None, arg: str = "group"
) -> dist.ProcessGroup:
    """Return `group`, or by default the group of all ranks.

    Raises an error if this rank is not in the group, or if the group was destroyed.
    """
    if group is None and not dist.is_initialized():
        rule = "a process group if torch.distributed is not initialized (call init_process_group "
        checks.fail(op, arg, rule + "first)", None)
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        checks.fail(op, arg, "a process group that this rank is in", repr(group))
    if not exists(group):
        raise ValueError(f"dct::{op}: {arg} must exist, got one that was destroyed")
    return group


def exists(group: dist.ProcessGroup) -> bool:
    """Whether the group exists. `destroy_process_group` destroys one group or all groups."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


def separate_group(
    group: dist.ProcessGroup, name: str, timeout: timedelta, backend: str = "gloo"
) -> dist.ProcessGroup:
    """Create a group of the same ranks, whose collectives are independent of `group`.

    Only the ranks of `group` call this function. `dist.new_group` is no alternative, because every
    rank of the world has to call it. With `use_local_synchronization`, the name of the new group
    depends on the number of groups in the process. Ranks with different numbers of groups hang.

    Args:
        name: a new name for this `group`, the same on all ranks.
        timeout: the timeout of the group's collectives and of its creation.
        backend: as for `torch.distributed.new_group`.

    Raises:
        RuntimeError: some rank does not create the group.
    """
    made = new_group_like(group, f"{group.group_name}/dct/{name}", timeout, backend)
    made.barrier().wait()  # so that no rank destroys the group while another rank still connects
    return made


def destroyer(owner: object, *groups: dist.ProcessGroup) -> Callable[[], object]:
    """Return a function whose first call destroys these groups of `separate_group`.

    The function is also called when `owner` is garbage-collected. It is not called when Python
    exits, because collectives may still be running. Groups that are already destroyed are skipped.
    """
    end = weakref.finalize(owner, _destroy, groups)
    end.atexit = False
    return end


def _destroy(groups: Iterable[dist.ProcessGroup]) -> None:
    for group in groups:
        with contextlib.suppress(ValueError):  # if all groups have been destroyed
            dist.destroy_process_group(group)


POLL_SECONDS = 0.02  # polling, because store.wait blocks Ctrl-C and other users of the store


class PeerError(RuntimeError):
    """A different rank raised an error or sent no values in time. The message names the rank."""


# Ranks that take part in a comparison add 1 to its counter. A rank that gives up subtracts
# _GIVE_UP, which no number of ranks can outweigh. So the order of these two operations in the store
# decides for all ranks: the comparison is complete if all ranks had arrived before one gave up.
_ARRIVED, _GIVE_UP = "arrived", 2**40
_ERROR = "error"  # the text that the first rank that gives up stores; empty if it was too late


def _next_comparison(group: dist.ProcessGroup) -> dist.Store:
    """Return the store of this rank's next comparison in the group.

    Each rank counts its comparisons in a group. Ranks compare values with the same number.
    """
    store = dist.PrefixStore("dct/agreement", group.get_group_store())
    return dist.PrefixStore(str(store.add(f"rounds/{dist.get_rank()}", 1)), store)


def _give_up(store: dist.Store, error: str, ranks: int | None = None) -> None:
    """Raise `error` on every rank of a comparison, unless all of its `ranks` have arrived."""
    arrived = store.add(_ARRIVED, -_GIVE_UP) + _GIVE_UP
    if arrived >= 0:  # no rank gave up before
        store.set(_ERROR, "" if arrived == ranks else error)


def gather_values(
    op: str, values: Mapping[str, Any], group: dist.ProcessGroup, timeout: timedelta
) -> dict[int, dict[str, Any]]:
    """Collect the values of every rank of the group.

    Either every rank returns the values, or every rank raises an error, also ranks that call this
    function after the timeout of another rank.

    Args:
        op: the name of the operation, for errors; the same on all ranks.
        values: values that JSON can represent.
        timeout: how long to wait for the other ranks.

    Returns:
        {rank: its values}, in the group's order.

    Raises:
        PeerError: a different rank raised an error, or sent no values before the timeout.
        ValueError: ranks run different operations. Every rank raises this error.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    store, ranks = _next_comparison(group), dist.get_process_group_ranks(group)
    store.set(str(dist.get_rank()), json.dumps({"op": op, "values": values}))
    store.add(_ARRIVED, 1)
    while 0 < (arrived := store.add(_ARRIVED, 0)) < len(ranks):
        if time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            continue
        missing = [rank for rank in ranks if not store.check([str(rank)])]
        rule = f"every rank must do the same within {timeout.total_seconds():g} s"
        got = f"nothing from {named(missing)}: see the output there"
        _give_up(store, f"dct::{op}: {rule}, got {got}", len(ranks))
    if arrived != len(ranks):
        store.wait([_ERROR], timedelta(seconds=10))  # short, if the rank that gave up is alive
        if error := store.get(_ERROR).decode():
            raise PeerError(error)
    answers = {rank: json.loads(store.get(str(rank))) for rank in ranks}
    if len({answer["op"] for answer in answers.values()}) > 1:
        got = ", ".join(f"{answer['op']} on rank {rank}" for rank, answer in answers.items())
        raise ValueError(f"dct::{op}: every rank must do the same, got {got}")
    return {rank: answer["values"] for rank, answer in answers.items()}


def known_group(group: object) -> dist.ProcessGroup | None:
    """The group to notify of an error in the argument that determines the group.

    Returns `group`, or the default group if `group` is invalid. The other ranks probably use it.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # the members do not wait for this rank
        return None
    return group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD


@contextlib.contextmanager
def sharing_errors(op: str, *groups: dist.ProcessGroup | None) -> Iterator[None]:
    """Send an error that is raised inside to the other ranks of these groups.

    The other ranks raise a PeerError in their next `gather_values`. Put this context manager around
    the checks of each rank's arguments, and call `gather_values` in each group afterwards.

    Args:
        op: the name of the operation, for errors.
        groups: the groups to notify. Values that are not process groups are ignored.
    """
    try:
        yield
    except Exception as error:
        for group in groups:
            if isinstance(group, dist.ProcessGroup):
                with contextlib.suppress(Exception):  # if the store is gone, still raise `error`
                    _give_up(_next_comparison(group), _refusal(op, error))
        raise


@contextlib.contextmanager
def raising_together(op: str, group: dist.ProcessGroup, timeout: timedelta) -> Iterator[None]:
    """If a rank raises an error inside, raise an error on every rank of the group. Collective.

    The other ranks raise a PeerError at the end of the block.
    """
    with sharing_errors(op, group):
        yield
    gather_values(op, {}, group, timeout)


def _refusal(op: str, error: Exception) -> str:
    if isinstance(error, PeerError):  # already contains the rank that raised it
        return str(error)
    got = f"{type(error).__name__} from rank {dist.get_rank()}: {error}".removesuffix(": ")
    return f"dct::{op}: every rank must take part, got {got}"


def require_same(op: str, by_rank: Mapping[Any, Mapping[str, Any]]) -> None:
    """Raise an error that names the values of every rank unless they are the same on all ranks.

    Args:
        op: the name of the operation, for errors.
        by_rank: {rank: {name: value}}, with the same names for every rank.
    """
    for name in next(iter(by_rank.values())):
        if len({json.dumps(values.get(name)) for values in by_rank.values()}) > 1:
            got = ", ".join(f"{values.get(name)} on rank {r}" for r, values in by_rank.items())
            raise ValueError(f"dct::{op}: {name} must be the same on every rank, got {got}")


def compare(
    op: str, values: Mapping[str, Any], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise an error on every rank unless `values` are the same on all ranks of the group.

    Waits for all ranks, up to the timeout of the group's collectives on `device`. Errors are those
    of `gather_values` and `require_same`.
    """
    require_same(op, gather_values(op, values, group, timeout_of(group, device)))


def require_same_order(op: str, order: Sequence[object], group: dist.ProcessGroup) -> None:
    """Raise an error on every rank if the values in `order` differ between ranks. Collective.

    `group` is a gloo group, also if tensors are on CUDA, so that only the host waits.
    """
    compare_order(op, order, group)()


def compare_order(op: str, order: Sequence[object], group: dist.ProcessGroup) -> Callable[[], None]:
    """Start what `require_same_order` does. The result waits for all ranks, and may raise."""
    digest = zlib.crc32(repr(order).encode())
    bounds = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
    work = dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group, async_op=True)

    def require_same() -> None:
        work.wait()
        highest, lowest = bounds.tolist()
        if highest != -lowest:
            rule = "run the same modules in the same order"
            raise RuntimeError(f"dct::{op}: every rank must {rule}, got different ones on some")

    return require_same


class Agreement:
    """Compares what the ranks of a state must agree on: settings, and the run that they resume.

    Ranks compare their settings in the constructor. They compare their run, checkpoint and step
    before the first step, and again after `resume`.

    Args:
        op: the entry point, for error messages.
        group: the ranks.
        device: selects the backend of `group`, whose timeout bounds the wait for other ranks.
        values: {name: JSON value}, the settings.
        shards: the ranks that hold the shards of this rank's replica, or None. These ranks also
            compare everything, except values["shard"].

    Attributes:
        rank: the rank of this process; valid after process groups are destroyed.
        run_id: created by the first rank when training starts, and again in the first step after a
            load. Checkpoints contain it.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup,
        device: torch.device,
        values: Mapping[str, Any],
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        self._group, self._shards, self._device = group, shards, device
        self.rank, self.run_id = dist.get_rank(), uuid.uuid4().hex
        self._checkpoint, self._start = "none", 0  # what `resume` was called for
        self._contents: dict[str, Any] = {}  # of the checkpoint
        self._compared = False
        values = {"version": __version__, **values}
        with sharing_errors(op, shards):
            self.run_id = self._compare(op, values, group, self.run_id)[0]
        if shards is not None:  # by now the first rank of `shards` has the id of its group
            del values["shard"]
            self.run_id = self._compare(op, values, shards, self.run_id)[0]

    def _compare(
        self, op: str, values: Mapping[str, Any], group: dist.ProcessGroup, own: Any = None
    ) -> list[Any]:
        """Compare `values` with the ranks of a group. Returns `own` of every rank, in order."""
        gathered = gather_values(op, {**values, "own": own}, group, timeout_of(group, self._device))
        found = [values.pop("own") for values in gathered.values()]
        require_same(op, gathered)
        return found

    def resume(
        self, step: int, entry: Mapping[str, Any] | None = None, base: Sequence[Tensor] = ()
    ) -> None:
        """Resume at `step` of this run, or of the run of a checkpoint's entry.

        All ranks must call this method. It does not communicate.

        Args:
            entry: everything in it must be the same on every rank, except "parameters".
            base: float32 tensors that were loaded and must be bitwise equal on every rank.
        """
        if entry is not None:
            self.run_id = entry["run_id"]
            self._checkpoint = f"one of {entry['world_size']} ranks"
            keys = sorted(entry.keys() - {"parameters", "run_id", "step"})
            shown = (digest(v) if isinstance(v := entry[key], list) else v for key in keys)
            names = (f"{key} of the checkpoint" for key in keys)
            self._contents = dict(zip(names, shown, strict=True))
        if base:
            self._contents["loaded weights"] = digest(bit_sums(base))
        self._start, self._compared = step, False

    def check(self, op: str, number: Callable[[], int] = int) -> list[int]:
        """Raise on every rank if the ranks do not resume from the same step of the same run.

        The first call, and the first call after `resume`, wait for all ranks up to the group's
        timeout, and return the result of `number` on each rank. Other calls do nothing and return
        an empty list. After a load, all ranks then adopt a new `run_id`, so that the files of two
        attempts to continue from one checkpoint differ. `op` is the call that every rank made, for
        error messages.
        """
        if self._compared:
            return []
        values = {"checkpoint": self._checkpoint, "run_id": self.run_id, "step": self._start}
        values |= self._contents
        new_id = uuid.uuid4().hex
        with sharing_errors(op, self._group, self._shards):
            own = number()
        with sharing_errors(op, self._shards):
            found = self._compare(op, values, self._group, [new_id, own])
        new_id, _ = found[0]
        if self._shards is not None:
            for key in ("shard of the checkpoint", "loaded weights"):
                values.pop(key, None)
            new_id = self._compare(op, values, self._shards, new_id)[0]
        if self._contents:
            self.run_id = new_id
        self._compared = True
        return [own for _, own in found]

    def check_step(self, op: str, step: int) -> None:
        """Raise on every rank if the ranks call `op` after different steps. Waits for all ranks."""
        compare(op, {"step": step}, self._group, self._device)


def bit_sums(tensors: Iterable[Tensor]) -> list[int]:
    """The sums of the bits of each tensor as integers. Compares tensors between ranks cheaply."""
    bits = [t.detach().view(_INTEGERS[t.itemsize]).sum(dtype=torch.int64) for t in tensors]
    return torch.stack(bits).tolist() if bits else []


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element


def digest(value: object) -> str:
    """A short text to compare between ranks instead of a long value. Equal values have one repr."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def named(ranks: Iterable[int | str]) -> str:
    """Ranks as text, for errors: "rank 1", "ranks 0, 2"."""
    numbers = list(map(str, ranks))
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
