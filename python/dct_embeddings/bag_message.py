"""Bags of ids, cut up by the ranks that own the ids' rows, as one message to each."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks
from dct_parallel.collectives import all_to_all


def by_rank(
    bag: Tensor, names: Tensor, bags_of: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """For every rank the lengths of its bags, int32, and the names in them. The host waits.

    Args:
        bag: int64 [n], the bag that each name is in; those of rank 0 first, then of rank 1.
        names: [n], in a bag in this order.
        bags_of: how many bags each rank has.
    """
    lengths = torch.bincount(bag, minlength=sum(bags_of)).int().split(list(bags_of))
    counts = torch.stack([own.sum() for own in lengths]).tolist()
    return list(lengths), list(names[bag.argsort(stable=True)].split(counts))


def exchange_bags(
    op: str,
    lengths: list[Tensor],
    names: list[Tensor],
    arriving: list[int],
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Rank r gets lengths[r] and names[r]; returns those that came, source by source.

    One all-to-all of 4 bytes a bag and to each rank, and 4 or 8 a name, as they are. The host
    waits. Every rank sends this one as many bags as this one has itself.

    Args:
        lengths: int32, of the bags of each rank, as `by_rank` gives them.
        names: int32 or int64, those in the bags of each rank.
        arriving: how many names come from each rank.

    Returns:
        int32 [ranks * bags of this rank], and names [sum(arriving)].

    Raises:
        ValueError: the lengths that a rank sent are not those of so many names.
    """
    bags, dtype = len(lengths[group.rank()]), names[0].dtype
    parts = [part.view(torch.int32) for pair in zip(lengths, names, strict=True) for part in pair]
    words = dtype.itemsize // 4
    sent = [len(own) + words * len(of) for own, of in zip(lengths, names, strict=True)]
    came = [bags + words * count for count in arriving]
    received = all_to_all(torch.cat(parts), sent, came, group)
    pieces = received.split([size for count in arriving for size in (bags, words * count)])
    of_bags = torch.stack(pieces[::2])
    counts = torch.where((of_bags < 0).any(1), -1, of_bags.sum(1)).tolist()
    if counts != arriving:  # bags would begin outside of the names
        checks.fail(op, "lengths of bags", f"of {arriving} ids", counts)
    return of_bags.flatten(), torch.cat(pieces[1::2]).view(dtype)
