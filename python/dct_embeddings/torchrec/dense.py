"""The communication hook for the dense part of a TorchRec model."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

from dct_kernels import checks
from dct_parallel import DCTState, dct_hook

from ._torchrec import dense_part

_OP = "compress_dense"


def compress_dense(dmp: DistributedModelParallel, **settings: Any) -> DCTState:
    """Compress the gradients of the dense part of a TorchRec model with `dct_hook`.

    TorchRec wraps the dense part in one DistributedDataParallel, where this call registers the
    hook. The hook does not apply to tables that are sharded data-parallel. Collective: call it on
    every rank before the first step.

    Args:
        dmp: DistributedModelParallel or DMPCollection whose dense part is already wrapped.
        **settings: see `DCTState`.

    Returns:
        The hook's state. Save its `state_dict()` on every rank with the model, or pass the state
        itself to torch.distributed.checkpoint.

    Raises:
        ValueError, TypeError: an argument is out of range, `dmp` has no DistributedDataParallel
            yet, or it already has a hook.
        RuntimeError: see `DCTState`.
    """
    kinds = "a DistributedModelParallel or DMPCollection"
    checks.require_type(_OP, "dmp", dmp, DistributedModelParallel, kinds)
    ddp = dense_part(dmp)
    if not isinstance(ddp, DistributedDataParallel):
        rule = "one whose dense part is in DistributedDataParallel (init_data_parallel)"
        checks.fail(_OP, "dmp", rule, f"a {type(ddp).__name__} in it")
    if ddp._comm_hooks:
        hook, _ = ddp._comm_hooks[0]
        got = getattr(hook, "__qualname__", type(hook).__name__)
        rule = "one whose DDP has no hook yet (allreduce_comm_precision sets one)"
        checks.fail(_OP, "dmp", rule, got)
    state = DCTState(ddp, **settings)
    ddp.register_comm_hook(state, dct_hook)
    return state
