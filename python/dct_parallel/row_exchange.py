"""What every exchange of packed rows needs: one message of two tensors, and ranks that agree."""

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import _checks


def join(values: Tensor, positions: Tensor) -> Tensor:
    """One uint8 [B, bytes] of values [B, k] and positions uint8 [B, w]: one collective, not two."""
    return torch.cat([values.view(torch.uint8), positions], 1)


def split(message: Tensor, k: int, value_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values and positions that `join` made one."""
    at = k * value_dtype.itemsize
    # contiguous() would leave a single row as it is: not aligned for value_dtype.
    values = message[:, :at].clone(memory_format=torch.contiguous_format)
    return values.view(value_dtype), message[:, at:].contiguous()


class GroupForBackward:
    """A process group as an autograd graph may hold it: weakly.

    A graph often lives until the process exits. A group that it kept alive would join its threads
    only then, when they can no longer enter Python, and the process aborts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    def get(self) -> dist.ProcessGroup:
        """The group; RuntimeError if it was destroyed since."""
        group = self._group()
        if group is None:
            raise RuntimeError("the process group must live until the backward pass is done")
        return group


def require_group(op: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, by default of all ranks, once this rank is known to be in it."""
    if group is None and not dist.is_initialized():
        _checks.fail(op, "group", "given, or torch.distributed initialised", "neither")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        _checks.fail(op, "group", "a process group that this rank is in", group)
    return group


def require_rows(op: str, x: Tensor) -> Tensor:
    """`x` [B, d], made contiguous."""
    x = x.contiguous() if isinstance(x, Tensor) else x
    _checks.require_tensor(op, "x", x, _checks.FLOATS, (2,))
    return x


def require_counts(op: str, arg: str, counts: Sequence[int], ranks: int, low: int = 0) -> None:
    """`counts` is an int for every rank, at least `low`."""
    if len(counts) != ranks:
        _checks.fail(op, arg, f"{ranks} elements, one for each rank", len(counts), verb="have")
    for rank, count in enumerate(counts):
        _checks.require_int(op, f"{arg}[{rank}]", count, low, 2**63 - 1)


def agree(
    op: str,
    counts: Sequence[int],
    same: dict[str, bool | int | float | torch.dtype],
    device: torch.device,
    group: dist.ProcessGroup,
) -> list[int]:
    """Tell rank r counts[r], and return what every rank told this one.

    The settings in `same` go along, so that every rank learns everybody's and all of them raise if
    two differ, before any of them waits for a message of another size. One all-to-all of 8 bytes a
    number; the host waits for its result.
    """
    settings = [_number(value) for value in same.values()]
    # float64 holds dtypes' codes, densities and every count that fits into memory, exactly.
    told = torch.tensor([[count, *settings] for count in counts], dtype=torch.float64)
    heard = torch.empty_like(told, device=device)
    dist.all_to_all_single(heard, told.to(device), group=group)
    received, *columns = heard.t().tolist()
    for name, column in zip(same, columns, strict=True):
        if len(set(column)) > 1:
            got = [
                f"{_value(number, same[name])} on rank {rank}" for rank, number in enumerate(column)
            ]
            _checks.fail(op, name, "the same on every rank", ", ".join(got))
    return [int(count) for count in received]


def _number(value: bool | int | float | torch.dtype) -> float:
    return float(_checks.FLOATS.index(value) if isinstance(value, torch.dtype) else value)


def _value(number: float, like: bool | int | float | torch.dtype) -> object:
    if isinstance(like, torch.dtype):
        return str(_checks.FLOATS[int(number)]).removeprefix("torch.")
    return type(like)(number)
