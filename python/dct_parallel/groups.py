"""Process groups as arguments, and as what an autograd graph remembers."""

import weakref

import torch.distributed as dist

from dct_kernels import checks


class GroupForBackward:
    """A process group as an autograd graph may hold it: weakly.

    A graph often lives until the process exits. A group that it kept alive would join its threads
    only then, when they can no longer enter Python, and the process aborts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    def get(self) -> dist.ProcessGroup:
        """The group; RuntimeError if it was destroyed since."""
        group = self._group()
        if group is None:
            raise RuntimeError("the process group must live until the backward pass is done")
        return group


def require_group(op: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, by default of all ranks, once this rank is known to be in it."""
    if group is None and not dist.is_initialized():
        checks.fail(op, "group", "given, or torch.distributed initialised", "neither")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        checks.fail(op, "group", "a process group that this rank is in", group)
    return group
