"""An exchange of rows in flight, forward and backward."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..groups import GroupForBackward


class Transfer(ABC):
    """Rows on their way: `wait` gives those that arrive.

    What is computed between the call that made it and `wait` overlaps with the exchange; and what
    the backward pass computes between the gradients of both overlaps with that of the gradients.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = GroupForBackward(group)
        self._token: Tensor | None = None
        self._finish: Callable[[], Tensor]  # the collective in flight

    def wait(self) -> Tensor:
        """The rows that arrived. To be called once."""
        if self._token is None:
            raise RuntimeError("a transfer is waited for once: keep what `wait` returned")
        token, self._token = self._token, None
        rows: Tensor = _Arrival.apply(token, self)  # type: ignore[no-untyped-call]
        return rows

    def start(self, x: Tensor) -> "Transfer":
        self._dtype = x.dtype
        self._token = _Departure.apply(x, self)  # type: ignore[no-untyped-call]
        return self

    # What an exchange is made of:

    @abstractmethod
    def _send(self, x: Tensor) -> None:
        """Encode rows and start their collective."""

    @abstractmethod
    def _receive(self) -> Tensor:
        """Finish it and decode what came."""

    @abstractmethod
    def _send_gradient(self, grad: Tensor) -> None:
        """Encode the gradient of what `_receive` returned, and start its collective."""

    @abstractmethod
    def _receive_gradient(self) -> Tensor:
        """Finish it and decode: the gradient of what `_send` was given."""

    def _all_to_all(self, sent: Tensor, splits: list[int], output_splits: list[int]) -> None:
        """Start the collective on slices of the first dimension."""
        received = sent.new_empty(sum(output_splits), *sent.shape[1:])
        group = self._group.get()
        work = dist.all_to_all_single(
            received, sent, output_splits, splits, group=group, async_op=True
        )
        self._in_flight(work, received)

    def _in_flight(self, work: dist.Work, received: Tensor) -> None:
        def finish() -> Tensor:
            work.wait()
            return received

        self._finish = finish

    def _arrived(self) -> Tensor:
        finish = self._finish
        del self._finish  # it holds the message
        return finish()


class _Departure(torch.autograd.Function):
    """Rows leave, and a token stands for them until they arrive. Backward, gradients arrive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer._send(x)
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer._receive_gradient(), None


class _Arrival(torch.autograd.Function):
    """Rows arrive. Backward, gradients leave."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer._receive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.transfer._send_gradient(grad)
        return grad.new_zeros(()), None
