"""Process groups of modules, and comparison of settings between their ranks."""

import contextlib
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dct_kernels import checks
from dct_parallel.groups import (
    compare,
    gather_values,
    require_group,
    require_same,
    sharing_errors,
    timeout_of,
)


class GroupOfModule:
    """Holds the process group of a module. Copies of the module share the group. Not picklable.

    Args:
        op: the name of the module, for error messages.
    """

    def __init__(self, op: str, group: dist.ProcessGroup) -> None:
        self._op, self._group = op, group

    def get(self) -> dist.ProcessGroup:
        return self._group

    def __deepcopy__(self, memo: dict[int, object]) -> "GroupOfModule":
        return self

    def __reduce__(self) -> NoReturn:
        got = "the module itself, whose process group cannot be saved"
        checks.fail(self._op, "the saved object", "a state_dict()", got, TypeError)


def require_same_settings(
    op: str, values: Mapping[str, object], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise on every rank, with the values of all ranks, if one of `values` differs.

    Collective, for set-up. It compares values as text, even invalid ones, so that a rank with an
    invalid value does not leave the other ranks waiting.
    """
    texts = {name: str(value) for name, value in values.items()}
    compare(op, texts, group, device)


def require_same_in_mesh(op: str, mesh: DeviceMesh, values: Mapping[str, Any]) -> None:
    """Raise on every rank of the mesh if one of `values` differs. The error lists all values.

    It waits up to the timeout of the mesh's groups, or the default group's timeout if shorter.
    """
    outer, inner = mesh.get_all_groups()
    device = torch.device(mesh.device_type)
    timeout = min(timeout_of(outer, device), timeout_of(inner, device))
    with contextlib.suppress(RuntimeError):  # the group may have no backend for this device
        timeout = min(timeout, timeout_of(require_group(op, None), device))
    # Exchange values in the inner group and then in the outer one, so that every rank has the
    # values of all ranks before any rank raises.
    with sharing_errors(op, outer):
        row = gather_values(op, values, inner, timeout)
    rows = gather_values(op, {str(rank): found for rank, found in row.items()}, outer, timeout)
    by_rank = {int(rank): found for row in rows.values() for rank, found in row.items()}
    require_same(op, dict(sorted(by_rank.items())))
