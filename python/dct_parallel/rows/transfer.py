"""An exchange of rows in flight, forward and backward."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dct_kernels import checks
from dct_kernels.row_layout import FORMATS

from ..formats import DTYPES
from ..groups import GroupForBackward

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


TensorFunction = Callable[[Tensor], Tensor]


def with_gradient(x: Tensor, forward: TensorFunction, backward: TensorFunction) -> Tensor:
    """forward(x). If the gradient of that is g, the gradient of `x` is backward(g).

    Neither function is differentiated, so there is no second derivative; under no_grad `backward`
    is not called. The graph keeps `backward` and all that it refers to alive, so it must refer to a
    process group by a `GroupForBackward`.
    """
    y: Tensor = _WithGradient.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return y


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: TensorFunction, backward: TensorFunction) -> Tensor:
        ctx.back = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


class Transfer(ABC):
    """The handle of `all_to_all_rows_async`, of which `wait` gives the received rows.

    Computation between the call that made it and `wait` overlaps with the exchange; its backward
    pass overlaps with the exchange of gradients.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = GroupForBackward(group)
        self._token: Tensor | None = None  # in place of the rows until they are received
        self._in_flight: tuple[dist.Work, Tensor]  # a collective, and where it writes

    def wait(self) -> Tensor:
        """The received rows. Call it once; a second call is a RuntimeError."""
        if self._token is None:
            raise RuntimeError(
                "wait() must be called once, got a second call: keep the rows that it returned"
            )
        token, self._token = self._token, None
        return with_gradient(token, lambda _: self._receive(), self._send_back)

    def start(self, x: Tensor) -> "Transfer":
        """Send the rows of `x`."""
        self._dtype = x.dtype
        self._token = with_gradient(x, self._leave, lambda _: self._receive_gradient())
        return self

    def _leave(self, x: Tensor) -> Tensor:
        self._send(x)
        return x.new_zeros(())

    def _send_back(self, grad: Tensor) -> Tensor:
        self._send_gradient(grad)
        return grad.new_zeros(())

    # The parts of an exchange:

    @abstractmethod
    def _send(self, x: Tensor) -> None:
        """Encode rows and start their collective."""

    @abstractmethod
    def _receive(self) -> Tensor:
        """Finish it and decode the message."""

    @abstractmethod
    def _send_gradient(self, grad: Tensor) -> None:
        """Encode the gradient of the result of `_receive`, and start its collective."""

    @abstractmethod
    def _receive_gradient(self) -> Tensor:
        """Finish it and decode the gradient of the argument of `_send`."""

    def _all_to_all(self, sent: Tensor, splits: list[int], output_splits: list[int]) -> None:
        """Start the collective on slices of the first dimension."""
        received = sent.new_empty(sum(output_splits), *sent.shape[1:])
        group = self._group.get()
        work = dist.all_to_all_single(
            received, sent, output_splits, splits, group=group, async_op=True
        )
        self._in_flight = work, received

    def _arrived(self) -> Tensor:
        """The tensor that the collective in flight receives, once it is done."""
        work, received = self._in_flight
        del self._in_flight  # it holds the message
        work.wait()
        return received
