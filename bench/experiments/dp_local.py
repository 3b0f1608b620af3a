"""Simulates local SGD on several ranks in one process, for dp_density.py.

Each rank has its own model, and an optimizer that uses only this rank's gradients. Every `period`
steps, the ranks average the changes of their weights. The weights are bitwise equal to the weights
that `DCTAverager` computes.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from dct_parallel.collectives import all_reduce_bytes

from . import dp_ranks
from .in_process import Buckets


class Local(dp_ranks.Counts):
    """Averages the models as `DCTAverager` does.

    Args:
        models: the models of all ranks, with equal weights.
        density: fraction of the changes that is sent.
        period: number of steps between averagings.
        format, transport: see `Buckets`.
        step_ahead: start each period from weights that include the residual.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        density: float,
        period: int,
        format: str = "bfloat16",
        transport: str = "all_gather",
        step_ahead: bool = False,
    ) -> None:
        self.weights = [list(model.parameters()) for model in models]
        self.sizes = [weight.numel() for weight in self.weights[0]]
        self.ranks, self.period, self.step_ahead = len(models), period, step_ahead
        self.base = self._flat(0)
        self.ahead = [torch.zeros_like(self.base) for _ in models]
        self.buckets = Buckets(self.sizes, self.ranks, density, format, transport)

    @torch.no_grad()
    def average(self) -> None:
        """Average the changes of the weights since the last call."""
        changes = [self._flat(rank) - self.base - self.ahead[rank] for rank in range(self.ranks)]
        self.base += self._update(changes)
        if self.step_ahead:
            self.ahead = [residual.clone() for residual in self.buckets.unsent()]
        for rank in range(self.ranks):
            start = self.base + self.ahead[rank] if self.step_ahead else self.base
            self._set(rank, start)

    def end(self) -> None:
        """Set the weights of all ranks to the averaged weights."""
        for rank in range(self.ranks):
            self._set(rank, self.base)

    def _update(self, changes: Sequence[Tensor]) -> Tensor:
        return self.exchange(self.buckets, changes)

    def _flat(self, rank: int) -> Tensor:
        return torch.cat([weight.detach().flatten() for weight in self.weights[rank]])

    @torch.no_grad()
    def _set(self, rank: int, flat: Tensor) -> None:
        for weight, part in zip(self.weights[rank], flat.split(self.sizes), strict=True):
            weight.copy_(part.view_as(weight))


class DiLoCo(Local):
    """DiLoCo (arXiv 2311.08105) with float32 all-reduces: Nesterov SGD applies the mean changes."""

    def __init__(self, models: Sequence[nn.Module], period: int, outer_rate: float) -> None:
        super().__init__(models, density=1, period=period)
        self.outer_rate, self.momentum = outer_rate, torch.zeros_like(self.base)

    def _update(self, changes: Sequence[Tensor]) -> Tensor:
        mean = sum(changes) / self.ranks
        self.sent += all_reduce_bytes(mean.nbytes, self.ranks)
        self.momentum = 0.9 * self.momentum + mean
        return self.outer_rate * (mean + 0.9 * self.momentum)


def train(
    models: Sequence[nn.Module],
    loss_of: Callable[[nn.Module, object], Tensor],
    batches: Sequence[Iterator],
    local: Local,
    step_weights: Sequence[Callable[[int], None]],
    steps: int,
) -> Iterator[tuple[float, dp_ranks.Counts]]:
    """Like `dp_ranks.train`, but each rank has its own model and optimizer."""
    for step in range(1, steps + 1):
        losses = []
        for model, rank_batches, update in zip(models, batches, step_weights, strict=True):
            model.zero_grad()
            loss = loss_of(model, next(rank_batches))
            loss.backward()
            update(step - 1)
            losses.append(loss.item())
        if step % local.period == 0:
            local.average()
        if step == steps:
            local.end()
        yield sum(losses) / len(losses), local
