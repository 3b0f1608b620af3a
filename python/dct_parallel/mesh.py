"""Two-dimensional device meshes: a rank's process groups, and the mesh of a cluster."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dct_kernels import checks

from .groups import compare, require_group, sharing_errors, timeout_of

NODES = ("node", "local")  # the dimensions across nodes and inside a node


def require_mesh(
    op: str, mesh: DeviceMesh, dimensions: tuple[str, str]
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's groups along these two dimensions of `mesh`, or raise an error."""
    checks.require_type(op, "mesh", mesh, DeviceMesh, "a DeviceMesh")
    if mesh.mesh_dim_names != dimensions:
        rule = f"dimensions {dimensions} (mesh_dim_names={dimensions})"
        checks.fail(op, "mesh", rule, mesh.mesh_dim_names, verb="have")
    if any((mesh.mesh.diff(dim=dim) < 0).any() for dim in range(2)):
        rule = "ascending ranks in every row and column, because torch sorts the ranks of a group"
        checks.fail(op, "mesh", rule, mesh.mesh.tolist(), verb="have")
    if mesh.get_coordinate() is None:
        checks.fail(op, "mesh", "this rank", f"one without rank {dist.get_rank()}", verb="include")
    outer, inner = dimensions
    return mesh.get_group(outer), mesh.get_group(inner)


def node_mesh(local_size: int | None = None, device_type: str | None = None) -> DeviceMesh:
    """Create the mesh of a cluster, with dimensions ("node", "local") and one row per node.

    Call it on every rank after initializing torch.distributed, because it creates process groups.
    Ranks must be numbered node by node, as torchrun numbers them. The groups have the timeout that
    `init_process_group` received.

    Args:
        local_size: number of ranks per node; default: LOCAL_WORLD_SIZE, which torchrun sets.
        device_type: "cuda" or "cpu"; default: "cuda" if torch finds a GPU.

    Returns:
        A DeviceMesh [nodes, local_size] for `DCTState`.

    Raises:
        ValueError, TypeError: an argument is invalid on this rank. All ranks raise an error
            if nodes differ in size or `local_size` does not divide the number of ranks.
        RuntimeError: another rank raised an error, or did not call this within the group's timeout.

    >>> state = DCTState(ddp, mesh=node_mesh())
    """
    op = "node_mesh"
    group = require_group(op, None)
    ranks = group.size()
    with sharing_errors(op, group):
        if local_size is None:
            variable = os.environ.get("LOCAL_WORLD_SIZE", "none")
            if not variable.isdecimal():
                rule = "given unless LOCAL_WORLD_SIZE is an integer (torchrun sets it)"
                checks.fail(op, "local_size", rule, variable)
            local_size = int(variable)
        checks.require_int(op, "local_size", local_size, 1, ranks)
        if device_type is None:
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
        checks.require_choice(op, "device_type", device_type, ("cuda", "cpu"))
        timeout = timeout_of(group, torch.device(device_type))
    settings = {"local_size": local_size, "device_type": device_type}
    compare(op, settings, group, torch.device(device_type))
    if ranks % local_size:
        checks.fail(op, "local_size", f"a divisor of the number of ranks, {ranks}", local_size)

    def along(rows: torch.Tensor) -> dist.ProcessGroup:
        if len(rows) == 1:
            return group
        made: dist.ProcessGroup
        made, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
        return made

    # init_device_mesh would create groups with torch's default timeout, half an hour on the CPU.
    nodes = torch.arange(ranks, dtype=torch.int64, device="cpu").view(-1, local_size)
    groups = [along(nodes.t()), along(nodes)]
    return DeviceMesh.from_group(groups, device_type, mesh=nodes, mesh_dim_names=NODES)
