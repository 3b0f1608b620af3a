"""How pooled embeddings get from the ranks that own rows to those that own samples."""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from ..rows.transfer import Transfer


class Exchange(Protocol):
    """Rows to the ranks they belong to; collective, and differentiable in x.

    `all_to_all_rows` is one, once its formats or its density are bound (`functools.partial`).
    """

    def __call__(
        self,
        x: Tensor,
        splits: Sequence[int],
        output_splits: Sequence[int],
        *,
        group: dist.ProcessGroup,
    ) -> Tensor:
        """x [sum(splits), d], ordered by destination, as [sum(output_splits), d], by source."""
        ...


def whole_rows(
    x: Tensor,
    splits: Sequence[int],
    output_splits: Sequence[int],
    *,
    group: dist.ProcessGroup,
) -> Tensor:
    """Rows of any dtype as they are, and their gradients."""
    return _WholeRows(list(splits), list(output_splits), group).start(x).wait()


class _WholeRows(Transfer):
    def __init__(
        self, splits: list[int], output_splits: list[int], group: dist.ProcessGroup
    ) -> None:
        super().__init__(group)
        self._splits, self._output_splits = splits, output_splits

    def _send(self, x: Tensor) -> None:
        self._all_to_all(x.contiguous(), self._splits, self._output_splits)

    def _receive(self) -> Tensor:
        return self._arrived()

    def _send_gradient(self, grad: Tensor) -> None:
        self._all_to_all(grad.contiguous(), self._output_splits, self._splits)

    def _receive_gradient(self) -> Tensor:
        return self._arrived()
