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
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

if TYPE_CHECKING:  # because the import takes a second
    from torch.distributed.fsdp import FSDPModule

# A context manager that names a span for the profiler. Without a profiler it takes less than 1 us.
# torch.profiler.record_function takes 6 to 15 us.
span = torch._C._profiler._RecordFunctionFast

# A context manager in which ops on tensors that do not require grad skip autograd's kernels. The
# skipped kernels would increment version counters, so the caller must increment the counters.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView


# Whether this thread runs inside a transform of torch.func.
transforms_are_active = torch._C._are_functorch_transforms_active

NO_PASS = -1
# The id of the current backward pass in this thread, or NO_PASS. A nested pass has a different id.
backward_pass = torch._C._current_graph_task_id
# The graph node that this thread evaluates, or None after the last node of a pass.
current_node = torch._C._current_autograd_node


def at_end_of_backward(callback: Callable[[bool], None]) -> None:
    """Call callback(nested) at the end of the current backward pass, before DDP waits for hooks.

    `nested`: whether the pass is nested in another one, as with reentrant checkpointing.
    """
    Variable._execution_engine.queue_callback(lambda: callback(_in_function_backward()))


def after_backward(last: int, callback: Callable[[bool], None]) -> int:
    """Call callback(nested) after FSDP2's callbacks at the end of the current backward pass.

    `last` is the pass of the last call, which did the same. Returns the current pass.
    """
    current = backward_pass()
    if current != last:
        # FSDP2 may reduce gradients in a callback. A callback that is queued inside a callback runs
        # after all others.
        at_end_of_backward(lambda nested: at_end_of_backward(callback))
    return current


def _in_function_backward() -> bool:
    """Whether this thread is inside the backward of a torch.autograd.Function."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False


_APPLY = BackwardCFunction.apply.__code__


def scale_of(scaler: GradScaler) -> Tensor | None:
    """The scale on the device, or None before the first `scale`. `get_scale` would synchronize."""
    return scaler._scale


def optimizer_notes(scaler: GradScaler) -> dict[int, dict[str, Any]]:
    """{id of an optimizer: its record since the last `update`}. `update` replaces the dict.

    A record contains the stage of the optimizer ("stage").
    """
    return scaler._per_optimizer_states


def count_writes(tensor: Tensor) -> int:
    """The number of in-place operations on the tensor so far."""
    return tensor._version


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The timeout of the group's collectives on this device."""
    return group._get_backend(device).options._timeout


def new_group_like(
    group: dist.ProcessGroup, name: str, timeout: timedelta, backend: str
) -> dist.ProcessGroup:
    """Create and register a group of the same ranks as `group`. Only these ranks call it.

    Args:
        name: unique in this process, and the same on all ranks.
        timeout: the timeout of the group's collectives and connections.
        backend: as for `torch.distributed.new_group`.
    """
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup
    create: Any = distributed_c10d._new_process_group_helper  # its GroupName is a str
    members = len(ranks), group.rank(), ranks, backend, group.get_group_store()
    made, _ = create(*members, name, timeout=timeout, group_desc="dct")
    distributed_c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    return made


def group_of_backends(
    group: dist.ProcessGroup, options: Any, nccl_options: Any
) -> tuple[dist.ProcessGroup, str]:
    """Register new backends in a subclass of ProcessGroup: gloo, and NCCL where CUDA exists.

    Args:
        group: a group without backends.
        options: the options of a backend registered with `extended_api`.
        nccl_options: options of NCCL, or None.

    Returns:
        A plain group with the same backends, and its backend string.
    """
    size = options.group_rank, options.group_size
    gloo: Any = dist.ProcessGroupGloo(
        dist.PrefixStore("gloo", options.store), *size, timeout=options.timeout
    )
    gloo.options.global_ranks_in_group = options.global_ranks_in_group
    gloo.options.group_name = options.group_id
    kinds: Any = dist.ProcessGroup.BackendType
    backends, names = dict.fromkeys(("cpu", "cuda"), (kinds.GLOO, gloo)), "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        chosen: Any = dist.ProcessGroupNCCL.Options() if nccl_options is None else nccl_options
        chosen._timeout = options.timeout
        chosen.global_ranks_in_group = options.global_ranks_in_group
        chosen.group_name = options.group_id
        store = dist.PrefixStore("nccl", options.store)
        backends["cuda"] = kinds.NCCL, dist.ProcessGroupNCCL(store, *size, chosen)
        names = "cpu:gloo,cuda:nccl"
    plain = dist.ProcessGroup(options.store, *size)
    for each in (group, plain):
        for device, (kind, backend) in backends.items():
            each._register_backend(torch.device(device), kind, backend)
        each._set_default_backend(kind)
    return plain, names


def has_step_hooks(optimizer: object) -> bool:
    """Whether the `step` of this optimizer calls hooks. The `step` of a wrapper may not."""
    return isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_post_hooks")


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """DDP's list of (hook, state). It is not a copy, so it includes hooks registered later."""
    return ddp._comm_hooks


def expects_sparse_gradients(ddp: DistributedDataParallel) -> bool:
    """Whether a submodule of this DDP module produces sparse gradients."""
    return any(ddp._build_params_for_reducer()[1])


def reduced_parameters(ddp: DistributedDataParallel) -> set[Tensor]:
    """The parameters whose dense gradients DDP reduces. Allocates all buckets temporarily."""
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return {parameter for bucket in buckets for parameter in bucket.parameters()}


def fsdp_groups(module: "FSDPModule") -> list[Any]:
    """FSDP2's parameter groups of this module. Each group has one flat gradient."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    group = state._fsdp_param_group  # before torch 2.13 there is at most one
    return [group] if group is not None else []


def fsdp_parameters(group: Any) -> list[nn.Parameter]:
    """The sharded parameters of a group, in the order of the flat gradient."""
    infos = [parameter._module_info for parameter in group.fsdp_params]
    return [getattr(info.module, info.param_name) for info in infos]


def fsdp_gathered_dtypes(group: Any) -> list[torch.dtype]:
    """The dtype in which FSDP2 gathers each parameter of a group.

    If the dtypes of the parameters differ, FSDP2 gathers all of them as bytes.
    """
    policy = group.mp_policy.param_dtype
    parameters = fsdp_parameters(group)
    return [policy if policy and p.is_floating_point() else p.dtype for p in parameters]


def fsdp_reduced_dtype(group: Any) -> torch.dtype | None:
    """The dtype in which FSDP2 reduces a group's gradients, or None if no parameter is trained."""
    trained = [parameter.dtype for parameter in fsdp_parameters(group) if parameter.requires_grad]
    policy, first = group.mp_policy, next(iter(trained), None)
    dtype: torch.dtype | None = first and (policy.reduce_dtype or policy.param_dtype or first)
    return dtype


def fsdp_shard_numels(group: Any) -> list[int]:
    """The number of elements of each parameter's padded shard, which is equal on all ranks."""
    return [parameter.padded_sharded_param_size.numel() for parameter in group.fsdp_params]


def fsdp_has_extension(group: Any) -> bool:
    """Whether a parameter of a group defines its own all-gather (fsdp_pre_all_gather)."""
    shards = [parameter._sharded_local_tensor for parameter in group.fsdp_params]
    return any(hasattr(shard, "fsdp_pre_all_gather") for shard in shards)


def fsdp_mesh_groups(group: Any) -> list[dist.ProcessGroup]:
    """The process groups along the mesh of a group: over shards, and over replicas."""
    names = "shard_process_group", "replicate_process_group"
    return [found for name in names if (found := getattr(group.mesh_info, name, None)) is not None]


def fsdp_shard_group(group: Any) -> dist.ProcessGroup | None:
    """The process group that shards a group's parameters, or None if they are replicated."""
    return getattr(group.mesh_info, "shard_process_group", None)


def fsdp_collectives(group: Any) -> tuple[Any, Any]:
    """The all-gather and the reduce-scatter of a group."""
    return group._all_gather_comm, group._reduce_scatter_comm


def fsdp_divide_factor(group: Any) -> float | None:
    """The user's divide factor for gradients, or None if FSDP2 chooses the factor."""
    factor: float | None = group.gradient_divide_factor
    return factor


def fsdp_hook(group: Any) -> object:
    """The all-reduce hook of a group, or None."""
    return group._all_reduce_hook


def fsdp_in_backward(module: "FSDPModule") -> bool:
    """Whether FSDP2 is in a backward pass. The end of a nested pass does not change the result."""
    return module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued
