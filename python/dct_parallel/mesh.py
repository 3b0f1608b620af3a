"""Device meshes of two dimensions: the two groups that a rank is in, and the mesh of a cluster."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dct_kernels import checks

from .groups import exchange, refusing, require_group, require_same, timeout_of

NODES = ("node", "local")  # dimensions: across nodes, and inside one


def require_mesh(
    op: str, mesh: DeviceMesh, dimensions: tuple[str, str]
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's group along each of the `dimensions` of `mesh`; raise if it has others."""
    if not isinstance(mesh, DeviceMesh):
        checks.fail(op, "mesh", "a DeviceMesh", type(mesh).__name__, TypeError)
    if mesh.mesh_dim_names != dimensions:
        checks.fail(op, "mesh", f"dimensions {dimensions}", mesh.mesh_dim_names, verb="have")
    if any((mesh.mesh.diff(dim=dim) < 0).any() for dim in range(2)):
        rule = "ascending ranks in every row and column, because torch sorts the ranks of a group"
        checks.fail(op, "mesh", rule, mesh.mesh.tolist(), verb="have")
    if mesh.get_coordinate() is None:
        got = f"one without rank {dist.get_rank()}"
        checks.fail(op, "mesh", "this rank", got, verb="include")
    outer, inner = dimensions
    return mesh.get_group(outer), mesh.get_group(inner)


def node_mesh(local_size: int | None = None, device_type: str | None = None) -> DeviceMesh:
    """The mesh of a cluster, of dimensions ("node", "local"): a row for each node's ranks.

    Every rank calls it, once torch.distributed is initialized: it makes process groups. Ranks are
    numbered node by node, as torchrun does. The groups have the timeout that `init_process_group`
    was given.

    Args:
        local_size: ranks per node; default torchrun's LOCAL_WORLD_SIZE.
        device_type: "cuda" or "cpu"; default CUDA where torch sees a GPU.

    Returns:
        A DeviceMesh [nodes, local_size], for `DCTState`.

    Raises:
        ValueError, TypeError: an argument is not known or out of its range, on this rank; nodes
            differ in size or the number of ranks is no multiple of it, on every rank.
        RuntimeError: a different rank raised, as the text says, or did not call this within the
            group's timeout.

    >>> state = DCTState(ddp, mesh=node_mesh())
    """
    op = "node_mesh"
    group = require_group(op, None)
    with refusing(op, group):
        if local_size is None:
            told = os.environ.get("LOCAL_WORLD_SIZE", "none")
            if not told.isdecimal():
                rule = "given unless LOCAL_WORLD_SIZE is an integer (torchrun sets it)"
                checks.fail(op, "local_size", rule, told)
            local_size = int(told)
        ranks = group.size()
        checks.require_int(op, "local_size", local_size, 1, ranks)
        if device_type is None:
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
        checks.require_choice(op, "device_type", device_type, ("cuda", "cpu"))
        timeout = timeout_of(group, torch.device(device_type))
    own = {"local_size": local_size, "device_type": device_type}
    require_same(op, exchange(op, own, group, timeout))
    if ranks % local_size:
        checks.fail(op, "local_size", f"a divisor of the number of ranks, {ranks}", local_size)

    def along(rows: torch.Tensor) -> dist.ProcessGroup:
        if len(rows) == 1:
            return group
        own: dist.ProcessGroup
        own, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
        return own

    # Not by init_device_mesh, whose groups have torch's default timeout, half an hour on the CPU.
    nodes = torch.arange(ranks).view(-1, local_size)
    groups = [along(nodes.t()), along(nodes)]
    return DeviceMesh.from_group(groups, device_type, mesh=nodes, mesh_dim_names=NODES)
