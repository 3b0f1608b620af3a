"""What all ranks of the mesh know of a step before the next one: one message of 16 bytes.

Ranks of other shards see nothing of this one's payloads, but hold parts of the same weights: a rank
that received damage does not come here, so that all others learn of it as well.
"""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dct_kernels import checks

OP = "dct_fully_shard_hook"  # in errors of this folder


def agree(order: Sequence[int], group: dist.ProcessGroup) -> None:
    """Compare what ranks exchanged; blocks until all have called it.

    Args:
        order: numbers of the units that it exchanged, to be the same everywhere.
        group: gloo on any device: the host waits, no stream does.

    Raises:
        RuntimeError: ranks exchanged different units, or in a different order: on all of them.
    """
    digest = zlib.crc32(bytes(torch.tensor(order, dtype=torch.int32).view(torch.uint8).tolist()))
    said = torch.tensor([digest, -digest])
    dist.all_reduce(said, dist.ReduceOp.MAX, group=group)
    highest, lowest = said.tolist()
    if highest != -lowest:
        rule = "through the same modules in the same order"
        checks.fail(
            OP, "every rank", rule, "different ones on some", RuntimeError, verb="go backward"
        )
