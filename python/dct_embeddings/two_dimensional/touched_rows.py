"""The rows of a table that the optimizer has changed, and their values before."""

import torch
from torch import Tensor


class TouchedRows:
    """Rows since the last `take`, each once. The cost of a step grows with its rows, not the table.

    The host waits in `add`, for the number of new rows.

    Args:
        weight: the table [rows, d]; one byte for each row is kept.
        keep: whether the values before are kept.
    """

    def __init__(self, weight: Tensor, keep: bool) -> None:
        self._known = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        self._keep = keep
        self._rows: list[Tensor] = []
        self._before: list[Tensor] = []

    def add(self, rows: Tensor, weight: Tensor) -> None:
        """Note `rows` [n], and keep the values of those that are new."""
        distinct = rows.unique()
        new = distinct[~self._known[distinct]]
        self._known[new] = True
        self._rows.append(new)
        if self._keep:
            self._before.append(weight[new])

    def take(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The rows, int32 [n] in no order, and the values before: [n, d] if kept, else [0, d]."""
        rows = torch.cat([self._known.new_empty(0, dtype=torch.int32), *self._rows])
        before = torch.cat([weight[:0], *self._before])
        self._known[rows] = False
        self._rows, self._before = [], []
        return rows, before
