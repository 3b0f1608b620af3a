"""An exchange of rows in flight, forward and backward."""

from abc import ABC, abstractmethod

import torch.distributed as dist
from torch import Tensor

from ..groups import GroupForBackward
from .autograd import with_gradient


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
