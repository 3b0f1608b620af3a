"""Process groups as arguments, in autograd graphs, and separate ones."""

import contextlib
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dct_kernels import checks

from .patience import ANSWER_SECONDS, STOPPED, within


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
