"""Splits bags of ids by the ranks that own the rows, and sends one message to each rank."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks
from dct_parallel.collectives import all_to_all

from .distinct import count

_INTS = (torch.int32, torch.int64)


def require_bags(op: str, ids: Tensor, lengths: Tensor, weight: Tensor) -> None:
    """Raise unless 2-D `lengths` match `ids`, both on the device of `weight`. The host waits."""
    like = ("weight", weight)
    checks.require_tensor(op, "ids", ids, _INTS, (1,), like)
    checks.require_tensor(op, "lengths", lengths, _INTS, (2,), like)
    # float64, because a sum of int64 could wrap around.
    totals = torch.stack([(lengths < 0).any().double(), lengths.sum(dtype=torch.float64)])
    negative, total = totals.tolist()
    if negative:
        checks.fail(op, "lengths", "at least 0", int(lengths.min()))
    if total != len(ids):
        checks.fail(op, "ids", f"{int(total)} elements like lengths", len(ids), verb="have")


def by_rank(
    bag: Tensor, names: Tensor, bag_counts: Sequence[int]
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Split a batch by rank. The host waits.

    Args:
        bag: int64 [n], the bag of each name. Bags are numbered rank by rank.
        names: [n], integers that identify rows on their rank; a bag keeps their order.
        bag_counts: the number of bags of each rank.

    Returns:
        For each rank, the lengths of its bags (int32), the names in them, and the common length of
        all its bags, or -1 if lengths differ.
    """
    lengths = count(bag, sum(bag_counts)).int().split(list(bag_counts))
    bounds = (part.aminmax() if len(part) else part.new_zeros(2) for part in lengths)
    rows = [torch.stack([part.sum(), *pair]) for part, pair in zip(lengths, bounds, strict=True)]
    counts, least, most = torch.stack(rows).t().tolist()
    common = [low if low == high else -1 for low, high in zip(least, most, strict=True)]
    return list(lengths), list(names[bag.argsort(stable=True)].split(counts)), common


def all_to_all_bags(
    op: str,
    lengths: list[Tensor],
    names: list[Tensor],
    common: list[int],
    arriving: list[tuple[int, int]],
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Send lengths[r] and names[r] to rank r. Return the received values, source by source.

    This takes one all-to-all, with 4 bytes per length and 4 or 8 bytes per name. Lengths for a rank
    are not sent if all bags for that rank have the same length. The host waits.

    Args:
        lengths: for each rank, the lengths of its bags (int32), from `by_rank`. All ranks send the
            same number of bags to this rank.
        names: for each rank, the names in its bags, int32 or int64.
        common: for each rank, the length of every one of its bags, or -1 to send lengths.
        arriving: for each rank, the number of names that it sends to this rank, and its `common`.

    Returns:
        lengths int32 [ranks * bags of this rank], and names [names received].

    Raises:
        ValueError: the lengths that a rank sent do not add up to its number of names.
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
    counts, common_lengths = map(list, zip(*arriving, strict=True))
    pairs = zip(pieces[::2], common_lengths, strict=True)
    bag_lengths = torch.stack([p if size < 0 else p.new_full((bags,), size) for p, size in pairs])
    sums = torch.where((bag_lengths < 0).any(1), -1, bag_lengths.sum(1)).tolist()
    if sums != counts:  # bags would begin outside the names
        rule = f"sum to {counts}, the numbers of ids received"
        raise ValueError(f"dct::{op}: lengths of bags must {rule}, got {sums}")
    return bag_lengths.flatten(), torch.cat(pieces[1::2]).view(dtype)
