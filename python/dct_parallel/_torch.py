"""Private names of torch that this package uses. Any version of torch may change them.

Tested with torch 2.11 (the oldest version supported), 2.13.0 and 2.14.1.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


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
