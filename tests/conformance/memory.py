"""Places arguments in memory so that stray writes and writes to inputs are detected."""

import torch

MARGIN = 64  # guard elements on each side of an argument
GUARD = 0xA5


class Arena:
    """Copies arguments to a device, between guards and misaligned by `offset` elements."""

    def __init__(self, device, offset=0):
        self.device, self.offset = device, offset
        self._checks = []

    def written(self, tensor, offset=None):
        """A copy that the op may write. Payloads must be aligned, so their offset is 0."""
        return self._place(tensor, offset)[0]

    def read(self, tensor, offset=None):
        """A copy that the op must not write."""
        if tensor is None:
            return None
        view, inside = self._place(tensor, offset)
        before = inside.clone()
        self._checks.append(lambda: _same(inside, before, "a read-only argument"))
        return view

    def check(self):
        for check in self._checks:
            check()

    def _place(self, tensor, offset):
        offset = self.offset if offset is None else offset
        itemsize = tensor.dtype.itemsize
        before, inside = (MARGIN + offset) * itemsize, tensor.numel() * itemsize
        buffer = torch.full((before + inside + MARGIN * itemsize,), GUARD, dtype=torch.uint8)
        buffer = buffer.to(self.device)
        guards = (buffer[:before], buffer[before + inside :])
        view = buffer.view(tensor.dtype)[MARGIN + offset :][: tensor.numel()].view(tensor.shape)
        view.copy_(tensor)
        for guard in guards:
            untouched = torch.full_like(guard, GUARD)
            self._checks.append(lambda g=guard, u=untouched: _same(g, u, "memory around"))
        return view, buffer[before : before + inside]


def _same(actual, expected, what):
    assert torch.equal(actual, expected), f"{what} was written"
