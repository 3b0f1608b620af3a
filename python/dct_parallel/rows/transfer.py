"""The parts that all exchanges of rows share: counts, gradients and handles."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dct_kernels import checks

from .._torch import transforms_are_active
from ..collectives import all_gather
from ..formats import ROW_FORMATS
from ..groups import GroupForBackward, gather_values, timeout_of

# All "format" settings of `RowFormat.settings_to_compare`: the format of the rows and, if it is
# different, of the gradients.
_FORMAT_PAIRS = [", ".join(dict.fromkeys(pair)) for pair in product(ROW_FORMATS, repeat=2)]

Setting = bool | int | float | str | None  # a string is one of _FORMAT_PAIRS


def require_counts(op: str, arg: str, counts: Sequence[int], ranks: int, low: int = 0) -> None:
    """Raise unless `counts` holds an integer for each rank, at least `low`."""
    checks.require_type(op, arg, counts, Sequence, "a sequence of integers, one for each rank")
    if len(counts) != ranks:
        checks.fail(op, arg, f"{ranks} elements, one for each rank", len(counts), verb="have")
    for rank, count in enumerate(counts):
        checks.require_int(op, f"{arg}[{rank}]", count, low, 2**63 - 1)


def all_to_all_numbers(
    op: str,
    numbers: Sequence[Sequence[int]],
    settings: Mapping[str, Setting],
    device: torch.device,
    group: dist.ProcessGroup,
    error: Exception | None = None,
) -> list[list[int]]:
    """Send numbers[r] to rank r, and return the numbers received from each rank.

    All ranks send equally many numbers. If `settings` differ between ranks, every rank raises an
    error, before any rank sends rows. If a rank passes an `error`, because its input is invalid,
    every rank raises it. The function performs one all-to-all with 8 bytes per number and setting.
    The host waits once, for the result.
    """
    width = len(numbers[0])
    encoded = [math.nan if error is not None else _encode(value) for value in settings.values()]
    # float64 represents densities, and all counts of rows that fit into memory, exactly.
    sent = torch.tensor([[*row, *encoded] for row in numbers], dtype=torch.float64, device="cpu")
    received = torch.empty_like(sent, device=device)
    dist.all_to_all_single(received, sent.to(device, non_blocking=True), group=group)
    rows = received.tolist()
    columns = list(zip(*rows, strict=True))[width:]
    if any(map(math.isnan, chain(*columns[:1]))):
        text = {"error": None if error is None else str(error)}
        texts = gather_values(op, text, group, timeout_of(group, device))
        errors = {rank: found["error"] for rank, found in texts.items() if found["error"]}
        got = "; ".join(f"an error on rank {rank}: {text}" for rank, text in errors.items())
        checks.fail(op, "every rank", "its input", got, verb="accept")
    for (name, value), column in zip(settings.items(), columns, strict=True):
        if len(set(column)) > 1:
            ranks = enumerate(column)
            got = ", ".join(f"{_decode(number, value)} on rank {rank}" for rank, number in ranks)
            checks.fail(op, name, "the same on every rank", got)
    return [[int(number) for number in row[:width]] for row in rows]


def _encode(value: Setting) -> float:
    return float(_FORMAT_PAIRS.index(value) if isinstance(value, str) else value or 0)


def _decode(number: float, like: Setting) -> object:
    if isinstance(like, str):
        return _FORMAT_PAIRS[int(number)]
    return type(like)(number) if isinstance(like, int) else number or None


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def runs_eagerly(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate an exchange, so that torch.compile runs it eagerly and torch.export raises."""
    rule = f"dct::{function.__name__}: the exchange must run eagerly"
    reason = f"{rule} (torch.compile without fullgraph=True breaks the graph here)"

    @functools.wraps(function)
    def exchange(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if torch.compiler.is_exporting():
            raise RuntimeError(f"{rule}, got torch.export")
        if transforms_are_active():  # a collective may abort the process
            raise RuntimeError(f"{rule}, got a transform of torch.func")
        return function(*args, **kwargs)

    eager: Callable[_Parameters, _Result] = torch.compiler.disable(exchange, reason=reason)
    return eager


TensorFunction = Callable[[Tensor], Tensor]


def with_gradient(op: str, x: Tensor, forward: TensorFunction, backward: TensorFunction) -> Tensor:
    """Return forward(x). If the gradient of this result is g, the gradient of `x` is backward(g).

    A second derivative, forward mode and transforms of torch.func raise an error. The graph keeps
    `backward` and all its references alive. So `backward` must refer to a process group through a
    `GroupForBackward`.

    Args:
        op: the public name, for errors.
    """
    if transforms_are_active():  # Dynamo would differentiate or batch `forward`
        checks.fail(op, "the call", "outside of torch.func (use torch.autograd)", "one inside")
    y: Tensor = _Gradient.apply(op, x, forward, backward)  # type: ignore[no-untyped-call]
    return y


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, x: Tensor, forward: TensorFunction, backward: Any) -> Tensor:
        ctx.op, ctx.function = op, backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse = partial(_refuse_second_derivative, ctx.op)
        return None, with_gradient(ctx.op, grad, ctx.function, refuse), None, None


def _refuse_second_derivative(op: str, grad: Tensor) -> NoReturn:
    raise RuntimeError(f"dct::{op}: the gradient must not be differentiated, got a second backward")


Receive = Callable[[], Tensor]  # waits for a pending collective
Send = Callable[[Tensor], Receive]  # starts a collective


class Transfer:
    """The handle of a pending exchange. `wait` returns the received rows.

    Computation between the start and `wait` overlaps with the exchange. Its backward pass overlaps
    with the exchange of gradients.

    Args:
        op: the public name, for errors.
        send: starts the exchange of `x`.
        send_gradient: starts the exchange of the result's gradient, which returns x's gradient.
    """

    _receive: Receive

    def __init__(self, op: str, x: Tensor, send: Send, send_gradient: Send) -> None:
        self._op, self._send_gradient = op, send_gradient
        # A token replaces the rows in the autograd graph until they are received.
        self._token: Tensor | None = with_gradient(op, x, partial(self._start, send), self._finish)

    def wait(self) -> Tensor:
        """Return the received rows. Call this method once. A second call raises RuntimeError."""
        if self._token is None:
            raise RuntimeError(
                "wait() must be called once, got a second call: keep the rows that it returned"
            )
        token, self._token = self._token, None
        start_backward = partial(self._start, self._send_gradient)
        return with_gradient(self._op, token, self._finish, start_backward)

    def _start(self, send: Send, x: Tensor) -> Tensor:
        self._receive = send(x)
        return x.new_zeros(())

    def _finish(self, token: Tensor) -> Tensor:
        receive = self._receive
        del self._receive  # frees the message
        return receive()


def start_all_to_all(
    sent: Tensor, splits: list[int], output_splits: list[int], group: GroupForBackward
) -> Receive:
    """Start an all-to-all of slices along the first dimension."""
    received = sent.new_empty(sum(output_splits), *sent.shape[1:])
    work = dist.all_to_all_single(
        received, sent, output_splits, splits, group=group.get(), async_op=True
    )
    return partial(_wait, work, sent, received)


def start_all_gather(tensor: Tensor, group: GroupForBackward) -> Receive:
    """Start an all-gather of `tensor` [n] into [P, n], in rank order."""
    received = tensor.new_empty(group.get().size(), len(tensor))
    work = all_gather(received, tensor, group.get(), async_op=True)
    return partial(_wait, work, tensor, received)


def _wait(work: dist.Work, sent: Tensor, received: Tensor) -> Tensor:
    work.wait()
    if received.is_cuda:  # allocated on the stream of the start, which may be a different one
        for tensor in (sent, received):
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return received
