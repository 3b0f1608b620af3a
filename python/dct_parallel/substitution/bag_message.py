"""Bags of ids, cut up by the ranks that own the ids' rows, as one message to each."""

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks

_INTS = (torch.int32, torch.int64)


def require_bags(op: str, ids: Tensor, lengths: Tensor, like: tuple[str, Tensor]) -> None:
    """`lengths` [fields, batch] are those of bags of all `ids`. The host waits."""
    checks.require_tensor(op, "ids", ids, _INTS, (1,), like)
    checks.require_tensor(op, "lengths", lengths, _INTS, (2,), like)
    if len(lengths) == 0:
        checks.fail(op, "lengths", "[fields, batch] with a field or more", tuple(lengths.shape))
    if (lengths < 0).any():
        checks.fail(op, "lengths", "0 and up", int(lengths.min()))
    total = lengths.sum(dtype=torch.float64)  # which does not wrap around, as int64 does
    if total != len(ids):
        checks.fail(op, "ids", f"{int(total)} elements like lengths", len(ids), verb="have")


def by_owner(
    owners: Tensor, names: Tensor, lengths: Tensor, ranks: int
) -> tuple[list[Tensor], list[Tensor]]:
    """For every rank the lengths of its bags, int32 [fields * batch], and the names in them.

    Args:
        owners: the rank that owns each id, int64 [ids].
        names: of the ids, in the order of their bags.
        lengths: of the bags, [fields, batch].
    """
    bags = lengths.numel()
    bag = torch.repeat_interleave(torch.arange(bags, device=names.device), lengths.flatten())
    cut = torch.bincount(owners * bags + bag, minlength=ranks * bags).view(ranks, bags)
    order = owners.argsort(stable=True)  # within a rank bag by bag, as they came
    return list(cut.int().unbind()), list(names[order].split(cut.sum(1).tolist()))


def exchange(
    op: str,
    lengths: list[Tensor],
    names: list[Tensor],
    arriving: list[int],
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Rank r gets lengths[r] and names[r]; returns those that came, source by source.

    One all-to-all of 4 bytes a bag and to each rank, and 4 or 8 a name, as they are.

    Args:
        arriving: how many names come from each rank.

    Raises:
        ValueError: the lengths that a rank sent are not those of so many names.
    """
    bags, dtype = len(lengths[0]), names[0].dtype
    parts = [part.view(torch.int32) for pair in zip(lengths, names, strict=True) for part in pair]
    words = dtype.itemsize // 4
    sent = [bags + words * len(own) for own in names]
    heard = [bags + words * count for count in arriving]
    message = torch.cat(parts)
    received = message.new_empty(sum(heard))
    dist.all_to_all_single(received, message, heard, sent, group=group)
    pieces = received.split([size for count in arriving for size in (bags, words * count)])
    of_bags = torch.stack(pieces[::2])
    counts = torch.where((of_bags < 0).any(1), -1, of_bags.sum(1)).tolist()
    if counts != arriving:  # bags would begin outside of the names
        checks.fail(op, "lengths of bags", f"of {arriving} ids", counts)
    return of_bags.flatten(), torch.cat(pieces[1::2]).view(dtype)
