"""Bags of ids, cut up by the ranks that own the ids' rows, as one message to each."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks
from dct_parallel.collectives import all_to_all

_INTS = (torch.int32, torch.int64)


def require_bags(op: str, ids: Tensor, lengths: Tensor, weight: Tensor) -> None:
    """`lengths` [n, batch] are those of bags of all `ids`, both beside `weight`. The host waits."""
    like = ("weight", weight)
    checks.require_tensor(op, "ids", ids, _INTS, (1,), like)
    checks.require_tensor(op, "lengths", lengths, _INTS, (2,), like)
    # A float64 does not wrap around, as an int64 does.
    told = torch.stack([(lengths < 0).any().double(), lengths.sum(dtype=torch.float64)])
    negative, total = told.tolist()
    if negative:
        checks.fail(op, "lengths", "at least 0", int(lengths.min()))
    if total != len(ids):
        checks.fail(op, "ids", f"{int(total)} elements like lengths", len(ids), verb="have")


def by_rank(
    bag: Tensor, names: Tensor, bags_of: Sequence[int]
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Per rank the lengths of its bags, int32, the names in them, and the common length of all its
    bags, or -1 if they differ. The host waits.

    Args:
        bag: int64 [n], each name's bag; bags of rank 0 first, then of rank 1.
        names: [n], inside a bag in this order.
        bags_of: the number of bags per rank.
    """
    lengths = torch.bincount(bag, minlength=sum(bags_of)).int().split(list(bags_of))
    bounds = (own.aminmax() if len(own) else own.new_zeros(2) for own in lengths)
    told = [torch.stack([own.sum(), *of]) for own, of in zip(lengths, bounds, strict=True)]
    counts, least, most = torch.stack(told).t().tolist()
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
    """Send lengths[r] and names[r] to rank r; returns those received, source by source.

    One all-to-all, of 4 bytes per bag and rank and 4 or 8 per name; lengths are not sent for bags
    that are all equally long. The host waits. Every rank sends this one as many bags as this rank
    has itself.

    Args:
        lengths: int32, of the bags per rank, as `by_rank` gives them.
        names: int32 or int64, in the bags per rank.
        alike: the length of all bags per rank, or -1 to send lengths.
        arriving: per rank, the number of names that it sends, and its `alike` for this rank.

    Returns:
        int32 [ranks * bags of this rank], and names [names received].

    Raises:
        ValueError: the lengths that a rank sent do not add up to its names.
    """
    bags, dtype = len(lengths[group.rank()]), names[0].dtype
    crossing = [own[:0] if of >= 0 else own for own, of in zip(lengths, alike, strict=True)]
    message = [
        part.view(torch.int32) for pair in zip(crossing, names, strict=True) for part in pair
    ]
    words = dtype.itemsize // 4
    sent = [len(own) + words * len(of) for own, of in zip(crossing, names, strict=True)]
    sizes = [(0 if of >= 0 else bags, words * count) for count, of in arriving]
    received = all_to_all(torch.cat(message), sent, [sum(size) for size in sizes], group)
    pieces = received.split([part for size in sizes for part in size])
    told, common = map(list, zip(*arriving, strict=True))
    parts = zip(pieces[::2], common, strict=True)
    of_bags = torch.stack([p if of < 0 else p.new_full((bags,), of) for p, of in parts])
    counts = torch.where((of_bags < 0).any(1), -1, of_bags.sum(1)).tolist()
    if counts != told:  # bags would begin outside of the names
        checks.fail(op, "lengths of bags", f"{told}, the ids received", counts, verb="sum to")
    return of_bags.flatten(), torch.cat(pieces[1::2]).view(dtype)
