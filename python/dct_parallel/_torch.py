"""Private names of torch that this package uses. Any version of torch may change them.

Tested with torch 2.11 (the oldest version supported), 2.13.0 and 2.14.1.
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch.utils import unwrap_dead_wrappers as unwrap_dead_wrappers
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

if TYPE_CHECKING:  # or else it takes a second to import
    from torch.distributed.fsdp import FSDPModule

# A context that names a span for the profiler. Without a profiler it costs less than 1 us, and
# torch.profiler.record_function 6 to 15 us.
span = torch._C._profiler._RecordFunctionFast

# A context in which ops on tensors that need no gradient skip autograd's own kernels. They count
# writes, which is left to the caller.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView


# Whether torch.func transforms the code that runs, and how Function.apply unwraps its arguments.
transforms_are_active = torch._C._are_functorch_transforms_active


def is_functionalizing() -> bool:
    """Whether this runs inside of torch.func.functionalize."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Functionalize for level in stack)


NO_PASS = -1
# The number of the backward pass under way in this thread, or NO_PASS. A nested pass has its own.
backward_pass = torch._C._current_graph_task_id
# The node of the graph that is evaluated in this thread; None after the last one of a pass.
current_node = torch._C._current_autograd_node


def at_end_of_backward(callback: Callable[[bool], None]) -> None:
    """Call callback(nested) at the end of the backward pass under way, before DDP waits for hooks.

    `nested`: whether it is the end of a nested pass, as of reentrant checkpointing.
    """
    Variable._execution_engine.queue_callback(lambda: callback(_in_a_function()))


def _in_a_function() -> bool:
    """Whether the backward function of a torch.autograd.Function is under way in this thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False


_APPLY = BackwardCFunction.apply.__code__


def scale_of(scaler: GradScaler) -> Tensor | None:
    """The scale, on the device; `get_scale` would synchronize. None before the first `scale`."""
    return scaler._scale


def calling_scaler() -> GradScaler | None:
    """The GradScaler whose `step` is under way in this thread, or None."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _SCALER_STEP:
        frame = frame.f_back
    return frame.f_locals["self"] if frame is not None else None


_SCALER_STEP = GradScaler.step.__code__


def optimizer_notes(scaler: GradScaler) -> dict[int, dict[str, Any]]:
    """{id of an optimizer: its stage since the last `update`}, which replaces the dict."""
    return scaler._per_optimizer_states


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long collectives of the group on this device wait for other ranks."""
    return group._get_backend(device).options._timeout


def new_gloo_group(group: dist.ProcessGroup, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """A registered gloo group of the same ranks as `group`. All of them call it, no others.

    Args:
        name: unique in this process, and the same on all ranks.
        timeout: of the group's collectives, and of its connections.
    """
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup
    made, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        group.rank(),
        ranks,
        "gloo",
        group.get_group_store(),
        name,  # type: ignore[arg-type]  # torch's GroupName is a str
        timeout=timeout,
        group_desc="dct",
    )
    distributed_c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    return made


def has_step_hooks(optimizer: object) -> bool:
    """Whether this is an optimizer that calls hooks in `step`; a wrapper may not."""
    return isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_post_hooks")


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """DDP's own list of its communication hooks, each with its state; it grows with them."""
    return ddp._comm_hooks


def expects_sparse_gradients(ddp: DistributedDataParallel) -> bool:
    """Whether a module of this DDP has sparse gradients."""
    return any(ddp._build_params_for_reducer()[1])


def reduced_parameters(ddp: DistributedDataParallel) -> set[Tensor]:
    """The parameters whose dense gradients this DDP reduces. Allocates its buckets for a moment."""
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return {parameter for bucket in buckets for parameter in bucket.parameters()}


def fsdp_groups(module: "FSDPModule") -> list[Any]:
    """FSDP2's groups of parameters of this module, each with one flat gradient."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    only = state._fsdp_param_group  # before torch 2.13 there is at most one
    return [only] if only is not None else []


def fsdp_parameters(group: Any) -> list[nn.Parameter]:
    """The sharded parameters of a group, in the order of its flat gradient."""
    infos = [parameter._module_info for parameter in group.fsdp_params]
    return [getattr(info.module, info.param_name) for info in infos]


def fsdp_gathered_dtypes(group: Any) -> list[torch.dtype]:
    """The dtype in which FSDP2 gathers each parameter of a group; it gathers several as bytes."""
    policy = group.mp_policy.param_dtype
    parameters = fsdp_parameters(group)
    return [policy if policy and p.is_floating_point() else p.dtype for p in parameters]


def fsdp_reduced_dtype(group: Any) -> torch.dtype | None:
    """The dtype in which FSDP2 reduces the gradients of a group; None if it has none."""
    trained = [parameter.dtype for parameter in fsdp_parameters(group) if parameter.requires_grad]
    policy, own = group.mp_policy, next(iter(trained), None)
    dtype: torch.dtype | None = own and (policy.reduce_dtype or policy.param_dtype or own)
    return dtype


def fsdp_shard_numels(group: Any) -> list[int]:
    """Elements of the shard of each parameter of a group, as it is sent; equal on all ranks."""
    return [parameter.padded_sharded_param_size.numel() for parameter in group.fsdp_params]


def fsdp_has_extension(group: Any) -> bool:
    """Whether a parameter of a group defines what is gathered for it."""
    shards = [parameter._sharded_local_tensor for parameter in group.fsdp_params]
    return any(hasattr(shard, "fsdp_pre_all_gather") for shard in shards)


def fsdp_shard_group(group: Any) -> dist.ProcessGroup | None:
    """The ranks that hold the shards of a group's parameters; None if each rank holds all."""
    return getattr(group.mesh_info, "shard_process_group", None)


def fsdp_collectives(group: Any) -> tuple[Any, Any]:
    """The all-gather and the reduce-scatter that a group calls."""
    return group._all_gather_comm, group._reduce_scatter_comm


def fsdp_divide_factor(group: Any) -> float | None:
    """The factor that the user divides gradients by; None: the number of ranks."""
    factor: float | None = group.gradient_divide_factor
    return factor


def fsdp_hook(group: Any) -> object:
    """The all-reduce hook of a group, or None."""
    return group._all_reduce_hook


def fsdp_in_backward(module: "FSDPModule") -> bool:
    """Whether FSDP2's backward pass is under way; others may be nested in it."""
    return module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued
