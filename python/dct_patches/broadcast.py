"""Patches over a process group."""

import json

import torch
import torch.distributed as dist

from dct_kernels import checks
from dct_parallel.groups import (
    gather_values,
    raising_together,
    require_group,
    require_same,
    sharing_errors,
    timeout_of,
)

from .patch import WeightPatch, from_header, require_unsharded
from .subscriber import WeightSubscriber


def broadcast_patch(
    patch: WeightPatch | None,
    src: int,
    group: dist.ProcessGroup | None = None,
    subscriber: WeightSubscriber | None = None,
) -> WeightPatch:
    """Send a patch or a full copy from one rank to all ranks of a group, and apply it there.

    The call returns after every rank has reported success, so the publisher can confirm the patch.
    If an error is raised on one rank, all ranks raise an error.

    Args:
        patch: the patch, on rank `src`. None on the other ranks.
        src: the rank that sends, as numbered in the world.
        group: the ranks; default: all. Tensors are sent from the GPU if its backend is NCCL.
        subscriber: applies the received patch on this rank. None: the patch is only returned.

    Returns:
        The patch, on every rank.

    Raises:
        ValueError, TypeError: an argument is invalid, or the subscriber rejects the patch.
        RuntimeError: another rank raised an error.

    >>> patch = publisher.diff(model.named_parameters())  # rank 0
    >>> broadcast_patch(patch, 0)
    >>> publisher.confirm(patch)

    >>> broadcast_patch(None, 0, subscriber=subscriber)  # other ranks
    """
    op = "broadcast_patch"
    group = require_group(op, group)
    nccl = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    timeout, header, data = timeout_of(group, device), "", []
    with sharing_errors(op, group):
        checks.require_int(op, "src", src, 0, dist.get_world_size() - 1)
        if src not in dist.get_process_group_ranks(group):
            checks.fail(op, "src", f"in {dist.get_process_group_ranks(group)}", src)
        if subscriber is not None:
            checks.require_type(op, "subscriber", subscriber, WeightSubscriber, "a subscriber")
        if dist.get_rank() == src:
            checks.require_type(op, "patch", patch, WeightPatch, "a WeightPatch on rank src")
            assert patch is not None
            require_unsharded(op, patch)
            header = patch.header()
            data = [part.data.to(device) for part in patch.parts]
        elif patch is not None:
            checks.fail(op, "patch", "None on ranks that receive", type(patch).__name__, TypeError)
    gathered = gather_values(op, {"src": src, "nbytes": len(header)}, group, timeout)
    nbytes = {rank: values.pop("nbytes") for rank, values in gathered.items()}[src]
    require_same(op, gathered)

    raw = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if patch is not None:
        raw.copy_(torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8))
    dist.broadcast(raw, src, group)
    if patch is None:
        header = bytes(raw.tolist()).decode()
        sizes = [size for size, _ in json.loads(header[8:])["data"]]
        data = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    for tensor in data:
        dist.broadcast(tensor, src, group)
    with raising_together(op, group, timeout):
        if patch is None:
            patch = from_header(op, "patch", header, data)
        if subscriber is not None and patch.is_full:
            subscriber.load(patch)
        elif subscriber is not None:
            subscriber.apply(patch)
    return patch
