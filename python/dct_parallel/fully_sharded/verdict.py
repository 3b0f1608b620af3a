"""What all ranks of the mesh have to know of a step before the next one: one message of 32 bytes.

Ranks of other shards see nothing of this one's payloads, but hold parts of the same weights.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dct_kernels import checks

OP = "dct_fully_shard_hook"  # what errors of this folder begin with


class Verdict(NamedTuple):
    damaged: int | None  # a rank that received a damaged payload
    overflowed: bool  # whether some gradient had a NaN or Inf


def reach(
    damaged: bool, overflowed: bool, order: Sequence[int], group: dist.ProcessGroup
) -> Verdict:
    """The same on every rank of the group, from what each of them saw; blocks until all are here.

    Args:
        damaged: whether this rank received a damaged payload.
        overflowed: whether it saw a NaN or Inf in a gradient.
        order: numbers of the units that it exchanged, to be the same everywhere.
        group: gloo, whatever the gradients are on: the host asks, and no stream waits.

    Raises:
        RuntimeError: ranks exchanged different units, or in another order: on all of them.
    """
    digest = zlib.crc32(bytes(torch.tensor(order, dtype=torch.int32).view(torch.uint8).tolist()))
    rank = dist.get_rank() + 1 if damaged else 0
    said = torch.tensor([rank, overflowed, digest, -digest])
    dist.all_reduce(said, dist.ReduceOp.MAX, group=group)
    rank, overflowed, highest, lowest = said.tolist()
    if highest != -lowest:
        rule = "through the same modules in the same order"
        checks.fail(OP, "every rank", rule, "others on some", RuntimeError, verb="go backward")
    return Verdict(rank - 1 if rank else None, bool(overflowed))
