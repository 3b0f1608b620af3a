"""Patches over a process group."""

import json

import torch
import torch.distributed as dist

from dct_kernels import checks
from dct_parallel import groups

from .files import reading
from .patch import WeightPatch, from_header, require_unsharded
from .shards import device_of
from .subscriber import WeightSubscriber


def broadcast_patch(
    patch: WeightPatch | None,
    src: int,
    group: dist.ProcessGroup | None = None,
    subscriber: WeightSubscriber | None = None,
) -> WeightPatch:
    """Send a patch or a full copy from one rank to all ranks of a group, and apply it there.

    The call returns the patch after every rank has reported success, so that the publisher can
    confirm it. If an error is raised on one rank, all ranks raise an error.

    Args:
        patch: the patch, on rank `src`. None on the other ranks.
        src: the rank that sends, as numbered in the world.
        group: the ranks; default: all. Tensors are sent from the GPU if its backend is NCCL.
        subscriber: applies the received patch on this rank. None: the patch is only returned.

    Raises:
        ValueError, TypeError: an argument is invalid, or the subscriber rejects the patch.
        RuntimeError: another rank raised an error.
    """
    op = "broadcast_patch"
    group = groups.require_group(op, group)
    device, header = device_of(group), ""
    timeout = groups.timeout_of(group, device)
    with groups.sharing_errors(op, group):
        checks.require_int(op, "src", src, 0, dist.get_world_size() - 1)
        if src not in (ranks := dist.get_process_group_ranks(group)):
            checks.fail(op, "src", f"in {ranks}", src)
        if subscriber is not None:
            checks.require_type(op, "subscriber", subscriber, WeightSubscriber, "a subscriber")
        if dist.get_rank() == src:
            checks.require_type(op, "patch", patch, WeightPatch, "a WeightPatch on rank src")
            assert patch is not None
            require_unsharded(op, patch)
            header = patch.header()
        elif patch is not None:
            checks.fail(op, "patch", "None on ranks that receive", type(patch).__name__, TypeError)
    gathered = groups.gather_values(op, {"src": src, "header": header}, group, timeout)
    header = {rank: values.pop("header") for rank, values in gathered.items()}[src]
    groups.require_same(op, gathered)
    if patch is not None:
        data = [part.data.to(device) for part in patch.parts]
    else:
        sizes = [size for size, _ in json.loads(header[8:])["data"]]
        data = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    for tensor in data:
        dist.broadcast(tensor, src, group)
    with groups.raising_together(op, group, timeout):
        if patch is None:
            with reading(op, "patch"):
                patch = from_header(header, data)
        if subscriber is not None:
            (subscriber.load if patch.is_full else subscriber.apply)(patch)
    return patch
