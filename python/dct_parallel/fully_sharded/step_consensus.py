"""What all ranks of the mesh know of a step before the next one: one message of 24 bytes.

Ranks of other shards see nothing of this one's payloads, but hold parts of the same weights.
"""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dct_kernels import checks

OP = "dct_fully_shard_hook"  # in errors of this folder


def agree(non_finite: bool, order: Sequence[int], group: dist.ProcessGroup) -> bool:
    """Whether a gradient was not finite on any rank; blocks until all have called it.

    Args:
        non_finite: as this rank saw it.
        order: numbers of the units that it exchanged, to be the same everywhere.
        group: gloo on any device: the host waits, no stream does.

    Raises:
        RuntimeError: ranks exchanged different units, or in a different order: on all of them.
    """
    digest = zlib.crc32(bytes(torch.tensor(order, dtype=torch.int32).view(torch.uint8).tolist()))
    said = torch.tensor([non_finite, digest, -digest])
    dist.all_reduce(said, dist.ReduceOp.MAX, group=group)
    anywhere, highest, lowest = said.tolist()
    if highest != -lowest:
        rule = "through the same modules in the same order"
        checks.fail(
            OP, "every rank", rule, "different ones on some", RuntimeError, verb="go backward"
        )
    return bool(anywhere)
