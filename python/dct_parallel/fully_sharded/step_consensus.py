"""The verdict of all ranks of the mesh on a step, before the next one: one message of 32 bytes.

Ranks of other shards see nothing of this one's payloads, but hold parts of the same weights.
"""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dct_kernels import checks

from ..exchange.results import Verdict

OP = "dct_fully_shard_hook"  # in errors of this folder


def agree(seen: Verdict, order: Sequence[int], group: dist.ProcessGroup) -> Verdict:
    """The verdict of all ranks on a step, from each one's own; blocks until all have called it.

    Damage that others received is `told` by one of them, unless this rank saw some itself.

    Args:
        seen: by this rank.
        order: numbers of the units that it exchanged, to be the same everywhere.
        group: gloo on any device: the host waits, no stream does.

    Raises:
        RuntimeError: ranks exchanged different units, or in a different order: on all of them.
    """
    digest = zlib.crc32(bytes(torch.tensor(order, dtype=torch.int32).view(torch.uint8).tolist()))
    unsound = bool(seen.damaged or seen.told)
    own = dist.get_rank() + 1 if unsound else 0
    said = torch.tensor([own, seen.non_finite, digest, -digest])
    dist.all_reduce(said, dist.ReduceOp.MAX, group=group)
    rank, non_finite, highest, lowest = said.tolist()
    if highest != -lowest:
        rule = "through the same modules in the same order"
        checks.fail(
            OP, "every rank", rule, "different ones on some", RuntimeError, verb="go backward"
        )
    told = [rank - 1] if rank and not unsound else seen.told
    return Verdict(seen.damaged, told, bool(non_finite))
