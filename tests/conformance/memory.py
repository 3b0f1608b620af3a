"""Arguments placed in memory so that a stray write, or a write to an input, shows."""

import torch

MARGIN = 64  # elements of guard on either side
GUARD = 0xA5


class Arena:
    """Copies arguments onto a device, each between guards, `offset` elements off alignment."""

    def __init__(self, device, offset=0):
        self.device, self.offset = device, offset
        self._checks = []

    def written(self, tensor, offset=None):
        """A copy that the op may write; payloads are placed at offset 0, they must be aligned."""
        return self._place(tensor, offset)[0]

    def read(self, tensor, offset=None):
        """A copy that the op must leave alone."""
        if tensor is None:
            return None
        view, inside = self._place(tensor, offset)
        before = inside.clone()
        self._checks.append(lambda: _same(inside, before, "an argument that is only read"))
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
