"""The function that users call; FSDP2 is imported only then, as that takes seconds."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from dct_kernels import checks

from ..agreement import refusing
from ..exchange.codec import Settings
from ..exchange.loss_scale import LossScale
from ..exchange.selection import require_transport
from ..groups import require_group
from ..mesh import require_mesh
from .step_consensus import OP

if TYPE_CHECKING:
    from .state import FullyShardState

DIMENSIONS = ("replicate", "shard")


def dct_fully_shard_hook(
    model: nn.Module,
    mesh: DeviceMesh,
    density: float = 0.005,
    refresh_every: int = 1000,
    value_dtype: torch.dtype | str = torch.bfloat16,
    transport: str | None = None,
    grad_scaler: GradScaler | None = None,
    start_step: int = 2,
    policy: str = "fresh",
) -> "FullyShardState":
    """Average the gradients of FSDP2 shards over replicas, compressed (hybrid sharding).

        mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        state = dct_fully_shard_hook(model, mesh, density=0.005)

    Call it on every rank, once all modules are wrapped on the shard dimension only and the model is
    on its device. FSDP reduces gradients over the shard dimension, densely; then each rank's shards
    are averaged over the replicate dimension like `DCTState`'s (DCT, arXiv 2010.08899), in one
    message per wrapped module. The mean is bitwise the same on every replica. Mutates FSDP's
    reduced gradients, in place. Keep the state's `state_dict()` in the checkpoint.

    The first `start_step` steps are dense, in bfloat16. From then on a message has one threshold,
    for all parameters of its module. Memory: 4 bytes per parameter *of a shard*, and each module's
    payload once per replica. The padding of uneven shards is never sent. Residuals are in units of
    the gradient that FSDP passes to its hook.

    Like DDP's hook, it hurts AdamW and not SGD (docs/guide/fsdp2.md).

    Replicas must be equal at the start: FSDP broadcasts nothing. Every replica's backward pass goes
    through the same modules in the same order, and gives every parameter a gradient
    (`model.set_reduce_scatter_unused_params(True)` fills in zeros). Gradients may be accumulated
    under `model.set_requires_gradient_sync(False)`, or by several passes that are each exchanged.
    `set_requires_all_reduce(False)` raises: without torch's own replicas it stops nothing.
    `set_gradient_divide_factor` divides the sum over the shard group, and the hook takes the mean
    over replicas: for the result of torch's hybrid sharding at factor f, set f / replicas.

    The receiver of a damaged payload of step t raises at the first gradient of step t + 1, or in
    whichever method of the state is called first, and in every later call: see `DCTState`.

    Args:
        model: all trainable parameters are in modules that `fully_shard` was applied to.
        mesh: of all ranks, with dimensions "replicate" and "shard".
        density: fraction of each rank's part of each module sent per step, in (0, 1].
        refresh_every: see `DCTState`.
        value_dtype: see `DCTState`.
        policy: see `DCTState`.
        transport: between replicas, "all_gather", "reduce_scatter" or None: see `DCTState`.
        grad_scaler: the GradScaler that scales the loss, if one does. The entries of a step that it
            skips return to the residual.
        start_step: steps before compression.

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
        settings = Settings(density, refresh_every, policy, value_dtype, OP)
        checks.require_int(OP, "start_step", start_step, 0, 2**63 - 1)
        require_transport(OP, transport)
        loss_scale = LossScale(OP, grad_scaler)
        require_mesh(OP, mesh, DIMENSIONS)
        if mesh.size() != dist.get_world_size():
            checks.fail(OP, "mesh", f"all {dist.get_world_size()} ranks", mesh.size(), verb="have")
        units = units_of(model, mesh)
    return FullyShardState(units, mesh, settings, transport, loss_scale, start_step)
