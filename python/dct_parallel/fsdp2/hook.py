"""The entry point `dct_fully_shard_hook`. It imports FSDP2 when called, which takes a second."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from dct_kernels import checks

from ..exchange.optimizers import Optimizers, loss_scale_of
from ..exchange.settings import Settings
from ..groups import require_group, sharing_errors
from ..mesh import require_mesh

if TYPE_CHECKING:
    from .state import FullyShardState

OP = "dct_fully_shard_hook"  # for error messages in this folder
DIMENSIONS = ("replicate", "shard")


@checks.names_keywords
def dct_fully_shard_hook(
    model: nn.Module,
    *,
    density: float | None = None,
    format: str | torch.dtype | None = None,
    transport: str | None = None,
    mesh: DeviceMesh,
    grad_scaler: GradScaler | None = None,
    optimizer: Optimizers | None = None,
    start_step: int = 2,
    refresh_every: int = 1,
) -> "FullyShardState":
    """Average the gradients of FSDP2 shards over replicas with compression (hybrid sharding).

        mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        state = dct_fully_shard_hook(model, mesh=mesh, format="int4")  # AdamW

    Call it on every rank, after moving the model to its device and applying `fully_shard` to all
    modules on the shard dimension only. FSDP reduces gradients densely over the shard dimension.
    Then the hook averages each rank's shards over the replicate dimension like `DCTState` (arXiv
    2010.08899), with one message per wrapped module. With AdamW pass `format="int4"`, and with SGD
    a `density`. The mean is bitwise the same on every replica, and overwrites FSDP's reduced
    gradients. Replicas must be equal at the start, because FSDP does not broadcast parameters. Save
    the state's `state_dict()` in the checkpoint. Memory: 4 bytes per parameter *of
    a shard*, and for each module a payload from each replica (with reduce-scatter, three payloads).
    See docs/guide/fsdp2.md.

    Args:
        model: a module. All its trainable parameters are in units of `fully_shard`.
        density: fraction of each rank's shard of a module to send per step; see `DCTState`.
        transport: the transport between replicas; see `DCTState`.
        mesh: a mesh of all ranks with dimensions "replicate" and "shard".
        format, grad_scaler, optimizer, start_step, refresh_every: see `DCTState`.

    Returns:
        The state: `plan`, `stats`, `parameter_stats`, `state_dict`, `load_state_dict`, `close`.

    Raises:
        ValueError, TypeError: an argument is out of range, ranks differ, or a module has several
            parameter groups or is wrapped differently (with a mesh of two dimensions, torch itself
            averages over replicas).
        RuntimeError: another rank raised an error, or did not call this in time. Restart the
            process.
    """
    from .state import FullyShardState  # see the module's docstring
    from .units import units_of

    with sharing_errors(OP, require_group(OP, None)):
        settings = Settings.checked(OP, density, format, transport, refresh_every)
        checks.require_int(OP, "start_step", start_step, 0, 2**63 - 1)
        require_mesh(OP, mesh, DIMENSIONS)
        if mesh.size() != dist.get_world_size():
            raise ValueError(
                f"dct::{OP}: mesh must have all {dist.get_world_size()} ranks, got {mesh.size()}"
            )
        units = units_of(model, mesh)
        parameters = [piece.parameter for unit in units for piece in unit.pieces]
        loss_scale = loss_scale_of(OP, grad_scaler, optimizer, parameters)
    return FullyShardState(units, mesh, settings, loss_scale, start_step)
