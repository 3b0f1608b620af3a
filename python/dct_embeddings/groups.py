"""Process groups of modules, and settings that must be the same on all of their ranks."""

import contextlib
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dct_kernels import checks
from dct_parallel.groups import exchange, refusing, require_group, require_same, timeout_of


class GroupOfModule:
    """A process group as a module may hold it: copies of the module share it, and saving fails.

    Args:
        op: the module, for the error.
    """

    def __init__(self, op: str, group: dist.ProcessGroup) -> None:
        self._op, self._group = op, group

    def get(self) -> dist.ProcessGroup:
        return self._group

    def __deepcopy__(self, memo: dict[int, object]) -> "GroupOfModule":
        return self

    def __reduce__(self) -> NoReturn:
        got = "the module itself, whose process group no file can hold"
        checks.fail(self._op, "the saved object", "a state_dict()", got, TypeError)


def require_alike(
    op: str, values: Mapping[str, object], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise, naming every rank's, if some of `values` is not the same on all; on all of them.

    Collective, and only for set-up. Values are compared as texts and may be invalid, so a rank with
    a wrong one does not leave the others waiting.
    """
    told = {name: str(value) for name, value in values.items()}
    require_same(op, exchange(op, told, group, timeout_of(group, device)))


def require_same_in_mesh(op: str, mesh: DeviceMesh, values: Mapping[str, Any]) -> None:
    """Raise on every rank of the mesh, naming every rank's, if some value differs.

    Waits up to the timeout of the mesh's groups, or that of all ranks if it is shorter.
    """
    outer, inner = mesh.get_all_groups()
    device = torch.device(mesh.device_type)
    timeout = min(timeout_of(outer, device), timeout_of(inner, device))
    with contextlib.suppress(RuntimeError):  # all ranks' group may have no backend for this device
        timeout = min(timeout, timeout_of(require_group(op, None), device))
    # First in the inner group, then its answers in the outer: all know all before any raises.
    with refusing(op, outer):
        told = exchange(op, values, inner, timeout)
    rows = exchange(op, {str(rank): v for rank, v in told.items()}, outer, timeout)
    everyone = {int(rank): value for row in rows.values() for rank, value in row.items()}
    require_same(op, dict(sorted(everyone.items())))
