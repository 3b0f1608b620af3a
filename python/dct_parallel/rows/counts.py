"""Counts of rows between ranks, and the check that all ranks use the same settings."""

from collections.abc import Mapping, Sequence
from itertools import product

import torch
import torch.distributed as dist

from dct_kernels import checks
from dct_kernels.row_layout import FORMATS

from ..formats import DTYPES

ROW_FORMATS = (*DTYPES, *FORMATS)
# As `RowFormat.told` names them: of rows, and of their gradients if that is a different one.
_BOTH = [", ".join(dict.fromkeys(pair)) for pair in product(ROW_FORMATS, repeat=2)]

Setting = bool | int | float | str | None  # a string is one of _BOTH


def require_counts(op: str, arg: str, counts: Sequence[int], ranks: int, low: int = 0) -> None:
    """Raise unless `counts` is an int per rank, at least `low`."""
    checks.require_type(op, arg, counts, Sequence, "a sequence of integers, one for each rank")
    if len(counts) != ranks:
        checks.fail(op, arg, f"{ranks} elements, one for each rank", len(counts), verb="have")
    for rank, count in enumerate(counts):
        checks.require_int(op, f"{arg}[{rank}]", count, low, 2**63 - 1)


def exchange_counts(
    op: str,
    counts: Sequence[int],
    must_match: Mapping[str, Setting],
    device: torch.device,
    group: dist.ProcessGroup,
) -> list[int]:
    """Tell rank r counts[r], and return every rank's count for this one; as `exchange_numbers`."""
    numbers = exchange_numbers(op, [[count] for count in counts], must_match, device, group)
    return [count for (count,) in numbers]


def exchange_numbers(
    op: str,
    numbers: Sequence[Sequence[int]],
    must_match: Mapping[str, Setting],
    device: torch.device,
    group: dist.ProcessGroup,
) -> list[list[int]]:
    """Tell rank r numbers[r], equally many each, and return every rank's numbers for this one.

    The settings in `must_match` are sent along, so that all ranks raise if two differ, before any
    of them waits for a message of a different size. One all-to-all of 8 bytes per number; the host
    waits for its result.
    """
    settings = [_number(value) for value in must_match.values()]
    # float64 holds densities and every count that fits into memory, exactly.
    told = torch.tensor([[*own, *settings] for own in numbers], dtype=torch.float64)
    heard = torch.empty_like(told, device=device)
    dist.all_to_all_single(heard, told.to(device), group=group)
    received = heard[:, : len(numbers[0])].long().tolist()
    columns = heard[:, len(numbers[0]) :].t().tolist()
    for name, column in zip(must_match, columns, strict=True):
        if len(set(column)) > 1:
            got = [
                f"{_value(number, must_match[name])} on rank {rank}"
                for rank, number in enumerate(column)
            ]
            checks.fail(op, name, "the same on every rank", ", ".join(got))
    return received


def _number(value: Setting) -> float:
    return float(_BOTH.index(value) if isinstance(value, str) else value or 0)


def _value(number: float, like: Setting) -> object:
    if isinstance(like, str):
        return _BOTH[int(number)]
    if isinstance(like, (bool, int)):
        return type(like)(number)
    return number or None
