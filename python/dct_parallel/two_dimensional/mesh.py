"""The two groups of a rank: those it shares tables with, and those that hold what it holds."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dct_kernels import checks

from ..agreement import Agreement, require_same

DIMENSIONS = ("replicate", "shard")


def require_mesh(op: str, mesh: DeviceMesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The replica group and the sharding group of this rank in `mesh`."""
    if not isinstance(mesh, DeviceMesh):
        checks.fail(op, "mesh", "a DeviceMesh", type(mesh).__name__, TypeError)
    if mesh.mesh_dim_names != DIMENSIONS:
        checks.fail(op, "mesh", f"of dimensions {DIMENSIONS}", mesh.mesh_dim_names)
    if mesh.get_coordinate() is None:
        checks.fail(op, "mesh", "one that this rank is in", f"rank {dist.get_rank()}")
    return mesh.get_group("replicate"), mesh.get_group("shard")


def require_same_in_mesh(op: str, mesh: DeviceMesh, values: dict) -> None:
    """Raise on every rank of the mesh, naming every rank's, if some value differs."""
    replicas, shards = require_mesh(op, mesh)
    device = torch.device(mesh.device_type)
    # First among those who share tables, then what they told: all know all before any raises.
    told = Agreement(shards, device).exchange(op, values)
    rows = Agreement(replicas, device).exchange(op, {str(rank): v for rank, v in told.items()})
    everyone = {int(rank): value for row in rows.values() for rank, value in row.items()}
    require_same(op, dict(sorted(everyone.items())))
