"""Models and gradients for tests with a mesh of nodes."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from dct_parallel import DCTState, dct_hook, node_mesh
from support.ranks import Dictated, assert_same, entry

# 4 blocks. With 2 or 4 ranks per node, parts after the first begin inside large parameters.
SIZES = (20_000, 100, 30_001)
ALL_SIZES = (SIZES, (1001, 30, 300, 255), (5, 3), (17,))  # the last two: short or empty parts
TRANSPORTS = ("all_gather", "reduce_scatter")


def meshed_model(sizes, local_size, bucket_cap_mb=25, **options):
    model = DDP(Dictated(sizes), bucket_cap_mb=bucket_cap_mb)
    return model, meshed_state(model, local_size, **options)


def meshed_state(model, local_size, **options):
    mesh = None if local_size is None else node_mesh(local_size, "cpu")
    state = DCTState(model, **{"density": 0.05, "mesh": mesh} | options)
    model.register_comm_hook(state, dct_hook)
    return state


def same_step(model, grads):
    """Return the flat mean gradient, after a check that it is equal on all ranks."""
    model.zero_grad()
    model(*grads).backward()
    mean = torch.cat([parameter.grad for parameter in model.module.p])
    assert_same(mean)
    return mean


def all_pending(state_dict):
    """Return the pending part of the mean gradient, summed over ranks: flat, in float64."""
    saved = entry(state_dict)
    nodes = saved["world_size"] // saved["local_size"]
    pending = torch.cat(
        [
            parts["residual"].double() / nodes + sum(parts["owner_residual"])
            for parts in saved["parameters"].values()
        ]
    )
    dist.all_reduce(pending)
    return pending


def rank_sum(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor
