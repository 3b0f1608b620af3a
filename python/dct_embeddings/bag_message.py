"""Bags of ids, cut up by the ranks that own the ids' rows, as one message to each."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks
from dct_parallel.collectives import all_to_all


def by_rank(
    bag: Tensor, names: Tensor, bags_of: Sequence[int]
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """For every rank the lengths of its bags, int32, the names in them, and the length that all of
    them have, or -1 where they differ. The host waits.

    Args:
        bag: int64 [n], the bag that each name is in; those of rank 0 first, then of rank 1.
        names: [n], in a bag in this order.
        bags_of: how many bags each rank has.
    """
    lengths = torch.bincount(bag, minlength=sum(bags_of)).int().split(list(bags_of))
    # Of no bags at all it is 0.
    bounds = [own.aminmax() if len(own) else (own.new_zeros(()),) * 2 for own in lengths]
    told = torch.stack(
        [torch.stack([own.sum(), *of]) for own, of in zip(lengths, bounds, strict=True)]
    )
    counts, least, most = told.t().tolist()
    alike = [low if low == high else -1 for low, high in zip(least, most, strict=True)]
    return list(lengths), list(names[bag.argsort(stable=True)].split(counts)), alike


def exchange_bags(
    op: str,
    lengths: list[Tensor],
    names: list[Tensor],
    alike: list[int],
    arriving: list[tuple[int, int]],
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Rank r gets lengths[r] and names[r]; returns those that came, source by source.

    One all-to-all of 4 bytes a bag and to each rank, and 4 or 8 a name, as they are; of bags that
    are all equally long lengths do not cross. The host waits. Every rank sends this one as many
    bags as this one has itself.

    Args:
        lengths: int32, of the bags of each rank, as `by_rank` gives them.
        names: int32 or int64, those in the bags of each rank.
        alike: the length of all bags of each rank, or -1 where lengths are to cross.
        arriving: how many names come from each rank, and its `alike` for this one.

    Returns:
        int32 [ranks * bags of this rank], and names [sum(arriving)].

    Raises:
        ValueError: the lengths that a rank sent are not those of so many names.
    """
    bags, dtype = len(lengths[group.rank()]), names[0].dtype
    crossing = [own[:0] if of >= 0 else own for own, of in zip(lengths, alike, strict=True)]
    parts = [part.view(torch.int32) for pair in zip(crossing, names, strict=True) for part in pair]
    words = dtype.itemsize // 4
    sent = [len(own) + words * len(of) for own, of in zip(crossing, names, strict=True)]
    sizes = [(0 if of >= 0 else bags, words * count) for count, of in arriving]
    received = all_to_all(torch.cat(parts), sent, [sum(size) for size in sizes], group)
    pieces = received.split([part for size in sizes for part in size])
    of_bags = torch.stack(
        [
            piece if of < 0 else piece.new_full((bags,), of)
            for piece, (_, of) in zip(pieces[::2], arriving, strict=True)
        ]
    )
    counts = torch.where((of_bags < 0).any(1), -1, of_bags.sum(1)).tolist()
    told = [count for count, _ in arriving]
    if counts != told:  # bags would begin outside of the names
        checks.fail(op, "lengths of bags", f"{told}, the ids received", counts, verb="sum to")
    return of_bags.flatten(), torch.cat(pieces[1::2]).view(dtype)
