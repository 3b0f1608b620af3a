"""Small device tensors brought to the host, which does not wait for them before it wants them."""

import torch
from torch import Tensor


class Readback:
    """One message from the device to the host at a time: `post`, and later `wait`.

    On CUDA `post` queues copies to pinned memory on the current stream, and `wait` blocks until
    they are done: a step later they are, so neither stops the host nor drains the queue. CPU
    tensors are handed over as they are: their owner must not overwrite them before `wait`.
    """

    def __init__(self) -> None:
        self._host: tuple[Tensor, ...] = ()
        self._copied: torch.cuda.Event | None = None

    def post(self, *tensors: Tensor) -> None:
        """Send these, always of the same shapes and dtypes, in place of what was sent before."""
        if tensors[0].device.type == "cpu":
            self._host = tensors
            return
        if self._copied is None:
            self._copied = torch.cuda.Event()
            self._host = tuple(
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors
            )
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._copied.record()

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors posted last, on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host
