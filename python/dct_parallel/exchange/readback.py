"""Small device tensors copied to the host, which waits for them only when it reads them."""

import torch
from torch import Tensor


class Readback:
    """One message from the device to the host at a time: `post`, and later `wait`.

    On CUDA `post` queues one kernel, which joins the tensors, and one copy to pinned memory, on the
    current stream; `wait` blocks until they are done. A step later they are, so the host does not
    stop and the queue does not drain.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._host = torch.empty(0, dtype=torch.int32)
        self._copied: torch.cuda.Event | None = None

    def post(self, *tensors: Tensor) -> None:
        """Copy these, int32 of one dimension and always of the same sizes, over the last ones."""
        words = torch.cat(tensors)
        if not self._sizes:
            self._sizes = [tensor.numel() for tensor in tensors]
            self._host = torch.empty(words.shape, dtype=words.dtype, pin_memory=words.is_cuda)
            self._copied = torch.cuda.Event() if words.is_cuda else None
        self._host.copy_(words, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors posted last, on the host, until the next are posted."""
        if self._copied is not None:
            self._copied.synchronize()
        tensors: tuple[Tensor, ...] = self._host.split(self._sizes)
        return tensors
