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
    compare(op, {name: str(value) for name, value in values.items()}, group, device)


def mesh_groups(mesh: object) -> list[Any]:
    """The groups in which the ranks of a mesh compare values, one after the other.

    This is the default group if the mesh contains all ranks, so that a rank with an invalid
    argument instead of the mesh can notify the other ranks.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.size() == dist.get_world_size():
        return [dist.group.WORLD]
    # The inner group is first, so that every rank has all values before any rank raises.
    return mesh.get_all_groups()[::-1] if mesh.get_coordinate() is not None else []


def require_same_in_mesh(
    op: str, mesh: DeviceMesh, values: Mapping[str, Any], of_shard: Mapping[str, Any] | None = None
) -> None:
    """Raise on every rank of the mesh if one of `values` differs. The error lists all values.

    `of_shard` contains values that must be the same on all replicas of a shard. It waits up to the
    timeout of the mesh's groups, or the default group's timeout if shorter.
    """
    device, groups = torch.device(mesh.device_type), mesh_groups(mesh)
    timeout = min(timeout_of(group, device) for group in mesh.get_all_groups())
    with contextlib.suppress(RuntimeError):  # the group may have no backend for this device
        timeout = min(timeout, timeout_of(require_group(op, None), device))
    found: dict[str, Any] = {str(dist.get_rank()): [values, of_shard or {}]}
    for number, group in enumerate(groups, 1):
        with sharing_errors(op, *groups[number:]):
            rows = gather_values(op, found, group, timeout)
        found = {rank: both for row in rows.values() for rank, both in row.items()}
    require_same(op, {rank: found[rank][0] for rank in sorted(found, key=int)})
    for ranks in mesh.mesh.t().tolist():
        require_same(op, {rank: found[str(rank)][1] for rank in ranks})
