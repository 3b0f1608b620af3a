"""Bags of ids, split by the ranks that own the ids' rows: one message to each rank."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks
from dct_parallel.collectives import all_to_all

_INTS = (torch.int32, torch.int64)


def require_bags(op: str, ids: Tensor, lengths: Tensor, weight: Tensor) -> None:
    """Raise unless `lengths` [n, batch] fit `ids`, on the device of `weight`. The host waits."""
    like = ("weight", weight)
    checks.require_tensor(op, "ids", ids, _INTS, (1,), like)
    checks.require_tensor(op, "lengths", lengths, _INTS, (2,), like)
    # An int64 would wrap around.
    totals = torch.stack([(lengths < 0).any().double(), lengths.sum(dtype=torch.float64)])
    negative, total = totals.tolist()
    if negative:
        raise ValueError(f"dct::{op}: lengths must be at least 0, got {int(lengths.min())}")
    if total != len(ids):
        rule = f"{int(total)} elements like lengths"
        raise ValueError(f"dct::{op}: ids must have {rule}, got {len(ids)}")


def by_rank(
    bag: Tensor, names: Tensor, bags_of: Sequence[int]
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Split a batch by rank. The host waits.

    Args:
        bag: int64 [n], each name's bag; bags of rank 0 first, then of rank 1.
        names: [n], in the order that they keep inside a bag.
        bags_of: the number of bags per rank.

    Returns:
        Per rank, the lengths of its bags, int32; the names in them; and the common length of all
        its bags, or -1 if they differ.
    """
    lengths = torch.bincount(bag, minlength=sum(bags_of)).int().split(list(bags_of))
    bounds = (part.aminmax() if len(part) else part.new_zeros(2) for part in lengths)
    rows = [torch.stack([part.sum(), *pair]) for part, pair in zip(lengths, bounds, strict=True)]
    counts, least, most = torch.stack(rows).t().tolist()
    common = [low if low == high else -1 for low, high in zip(least, most, strict=True)]
    return list(lengths), list(names[bag.argsort(stable=True)].split(counts)), common


def exchange_bags(
    op: str,
    lengths: list[Tensor],
    names: list[Tensor],
    common: list[int],
    arriving: list[tuple[int, int]],
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Send lengths[r] and names[r] to rank r; return the received ones, source by source.

    One all-to-all, of 4 bytes per bag and rank and 4 or 8 per name. Lengths are not sent if all
    bags for a rank are equally long. The host waits.

    Args:
        lengths: int32, of the bags per rank, from `by_rank`. Each rank sends this rank as many
            bags as this rank sends itself.
        names: int32 or int64, in the bags per rank.
        common: the length of all bags per rank, or -1 to send lengths.
        arriving: per rank, the number of names that it sends, and its `common` for this rank.

    Returns:
        int32 [ranks * bags of this rank], and names [names received].

    Raises:
        ValueError: the lengths that a rank sent do not add up to its names.
    """
    bags, dtype = len(lengths[group.rank()]), names[0].dtype
    sent = [part[:0] if size >= 0 else part for part, size in zip(lengths, common, strict=True)]
    parts = [(part, ids.view(torch.int32)) for part, ids in zip(sent, names, strict=True)]
    splits = [len(part) + len(ids) for part, ids in parts]
    words = dtype.itemsize // 4
    sizes = [(0 if size >= 0 else bags, words * count) for count, size in arriving]
    message = torch.cat([part for pair in parts for part in pair])
    received = all_to_all(message, splits, [sum(pair) for pair in sizes], group)
    pieces = received.split([size for pair in sizes for size in pair])
    counts, sizes_of_bags = map(list, zip(*arriving, strict=True))
    pairs = zip(pieces[::2], sizes_of_bags, strict=True)
    of_bags = torch.stack([p if size < 0 else p.new_full((bags,), size) for p, size in pairs])
    sums = torch.where((of_bags < 0).any(1), -1, of_bags.sum(1)).tolist()
    if sums != counts:  # bags would begin outside of the names
        rule = f"sum to {counts}, the ids received"
        raise ValueError(f"dct::{op}: lengths of bags must {rule}, got {sums}")
    return of_bags.flatten(), torch.cat(pieces[1::2]).view(dtype)
