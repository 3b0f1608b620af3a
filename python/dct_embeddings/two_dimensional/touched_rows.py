"""The rows of a table that the optimizer has changed, and their values before."""

import torch
from torch import Tensor


class TouchedRows:
    """Rows since the last `take`, each once. The cost of a step grows with its rows, not the table.

    The host waits in `add`, for the number of new rows.

    Args:
        rows: of the table; one byte for each is kept.
        device: of the table.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._known = torch.zeros(rows, dtype=torch.bool, device=device)
        self._rows: list[Tensor] = []
        self._before: list[tuple[Tensor, ...]] = []

    def add(self, rows: Tensor, *tensors: Tensor) -> None:
        """Note `rows` [n], and copy the new ones of each of `tensors`, [table rows, ...]."""
        distinct = rows.unique()
        new = distinct[~self._known[distinct]]
        self._known[new] = True
        self._rows.append(new)
        self._before.append(tuple(tensor[new] for tensor in tensors))

    def take(self, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The rows, int32 [n] in no order, and the copies that `add` made of each of `tensors`."""
        if not self._rows:
            none = self._known.new_zeros(0, dtype=torch.int32)
            return none, [tensor[none] for tensor in tensors]
        rows = torch.cat(self._rows)
        before = [torch.cat(parts) for parts in zip(*self._before, strict=True)]
        self._known[rows] = False
        self._rows, self._before = [], []
        return rows, before
