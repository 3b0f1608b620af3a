"""The function that users call; FSDP2 is imported only then, as that takes seconds."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from dct_kernels import checks

from ..exchange.loss_scale import Optimizers, loss_scale_of
from ..exchange.settings import Settings
from ..groups import refusing, require_group
from ..mesh import require_mesh

if TYPE_CHECKING:
    from .state import FullyShardState

OP = "dct_fully_shard_hook"  # in errors of this folder
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
    policy: str = "fresh",
    refresh_every: int = 1000,
) -> "FullyShardState":
    """Average the gradients of FSDP2 shards over replicas, compressed (hybrid sharding).

        mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        state = dct_fully_shard_hook(model, mesh=mesh, format="int4")  # AdamW

    Call it on every rank, once all modules are wrapped on the shard dimension only and the model is
    on its device. FSDP reduces gradients over the shard dimension, densely; then each rank's shards
    are averaged over the replicate dimension like `DCTState`'s (DCT, arXiv 2010.08899), in one
    message per wrapped module. With AdamW pass `format="int4"`, with SGD a `density`. The mean is
    bitwise the same on every replica. Mutates FSDP's reduced gradients, in place. Replicas must be
    equal at the start: FSDP broadcasts nothing. Keep the state's `state_dict()` in the checkpoint.
    Memory: 4 bytes per parameter *of a shard*, and each module's payload once per replica. Rules
    and limits: docs/guide/fsdp2.md.

    Args:
        model: all trainable parameters are in modules that `fully_shard` was applied to.
        density: fraction of each rank's part of each module sent per step; see `DCTState`.
        format: see `DCTState`.
        transport: between replicas; see `DCTState`.
        mesh: of all ranks, with dimensions "replicate" and "shard".
        grad_scaler: see `DCTState`.
        optimizer: see `DCTState`.
        start_step: see `DCTState`.
        policy: see `DCTState`.
        refresh_every: see `DCTState`.

    Returns:
        The state: `plan`, `stats`, `parameter_stats`, `state_dict`, `load_state_dict`, `close`.

    Raises:
        ValueError, TypeError: an argument is out of its range, a module is wrapped otherwise (torch
            averages over replicas itself where it is given a mesh of two dimensions), has several
            parameter groups, or ranks differ; the text names it.
        RuntimeError: a different rank raised, as the text says, or did not call this within the
            timeout of all ranks. Restart the process then.
    """
    from .state import FullyShardState  # late, see above
    from .units import units_of

    with refusing(OP, require_group(OP, None)):
        settings = Settings.checked(OP, density, format, transport, policy, refresh_every)
        loss_scale = loss_scale_of(OP, grad_scaler, optimizer)
        checks.require_int(OP, "start_step", start_step, 0, 2**63 - 1)
        require_mesh(OP, mesh, DIMENSIONS)
        if mesh.size() != dist.get_world_size():
            raise ValueError(
                f"dct::{OP}: mesh must have all {dist.get_world_size()} ranks, got {mesh.size()}"
            )
        units = units_of(model, mesh)
        if loss_scale is not None:
            loss_scale.watch(piece.parameter for unit in units for piece in unit.pieces)
    return FullyShardState(units, mesh, settings, loss_scale, start_step)
