"""The rows of a table that the optimizer has changed, and their previous values."""

import torch
from torch import Tensor


class TouchedRows:
    """Distinct rows since the last `take`. The cost of a step depends on its rows, not the table.

    Args:
        weight: the table [rows, d]; this object keeps one byte per row.
        keep: whether to keep the previous values.
    """

    def __init__(self, weight: Tensor, keep: bool) -> None:
        self._known = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        self._keep = keep
        self._rows: list[Tensor] = []
        self._before: list[Tensor] = []

    def add(self, rows: Tensor, weight: Tensor) -> None:
        """Add `rows` [n], and keep the values of new ones. The host waits for their number."""
        distinct = rows.unique()
        new = distinct[~self._known[distinct]]
        self._known[new] = True
        self._rows.append(new)
        if self._keep:
            self._before.append(weight[new])

    def take(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The rows, int32 [n] in no order; their previous values, [n, d] if kept, else [0, d]."""
        rows = torch.cat([self._known.new_empty(0, dtype=torch.int32), *self._rows])
        before = torch.cat([weight[:0], *self._before])
        self._known[rows] = False
        self._rows, self._before = [], []
        return rows, before
