"""Local steps of several ranks in one process, for dp_density.py.

Every rank has a model and an optimizer that sees this rank's gradients alone. Every `period` steps
the ranks average what their weights have moved by, with the bits that `DCTAverager` gives.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from . import dp_ranks
from .in_process import Buckets

POWERS = {"root": 0.5, "rate": 1}  # of the rate, for `due`


class Local(dp_ranks.Counts):
    """Averages the models as `DCTAverager` does.

    Args:
        models: of all ranks, with equal weights.
        density: of what weights have moved by.
        period: steps.
        decay: of the residual, from one averaging to the next.
        format, transport: see `Buckets`.
        step_ahead: start each period from weights to which the residual has been added.
        spaced: average as often, but further apart where the learning rate is lower: see `due`.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        density: float,
        period: int,
        decay: float = 1.0,
        format: str = "bfloat16",
        transport: str = "all_gather",
        step_ahead: bool = False,
        spaced: str | None = None,
    ) -> None:
        self.weights = [list(model.parameters()) for model in models]
        self.sizes = [weight.numel() for weight in self.weights[0]]
        self.ranks, self.period, self.decay = len(models), period, decay
        self.step_ahead, self.spaced = step_ahead, spaced
        self.base = self._flat(0)
        self.ahead = [torch.zeros_like(self.base) for _ in models]
        self.buckets = Buckets(self.sizes, self.ranks, density, format, transport)

    @torch.no_grad()
    def average(self) -> None:
        """Average what the weights have moved by since the last call."""
        moved = [self._flat(rank) - self.base - self.ahead[rank] for rank in range(self.ranks)]
        self.base += self.exchange(self.buckets, moved)
        torch._foreach_mul_(self.buckets.residuals(), self.decay)
        if self.step_ahead:
            self.ahead = [residual.clone() for residual in self.buckets.unsent()]
        for rank in range(self.ranks):
            start = self.base + self.ahead[rank] if self.step_ahead else self.base
            self._set(rank, start)

    def end(self) -> None:
        """Give every rank the weights that all have in common."""
        for rank in range(self.ranks):
            self._set(rank, self.base)

    def _flat(self, rank: int) -> Tensor:
        return torch.cat([weight.detach().flatten() for weight in self.weights[rank]])

    @torch.no_grad()
    def _set(self, rank: int, flat: Tensor) -> None:
        for weight, part in zip(self.weights[rank], flat.split(self.sizes), strict=True):
            weight.copy_(part.view_as(weight))


def due(rates: Sequence[float], period: int, spaced: str | None) -> set[int]:
    """The steps after which ranks average, counted from 1.

    Args:
        rates: the learning rate of each step.
        period: as many averagings as every `period` steps would be.
        spaced: None: every `period` steps. "rate", "root": the rate, or its square root, adds up to
            the same between two averagings.
    """
    if spaced is None:
        return set(range(period, len(rates) + 1, period))
    progress = [0.0, *itertools.accumulate(rate ** POWERS[spaced] for rate in rates)]
    share = progress[-1] * period / len(rates)
    pairs = enumerate(itertools.pairwise(progress), start=1)
    return {step for step, (before, after) in pairs if after // share > before // share} | {
        len(rates)
    }


def train(
    models: Sequence[nn.Module],
    loss_of: Callable[[nn.Module, object], Tensor],
    batches: Sequence[Iterator],
    local: Local,
    step_weights: Sequence[Callable[[int], None]],
    rates: Sequence[float],
) -> Iterator[tuple[float, dp_ranks.Counts]]:
    """As `dp_ranks.train`, but every rank has a model and an optimizer of its own.

    Args:
        rates: the learning rate of each step.
    """
    after = due(rates, local.period, local.spaced)
    for step in range(1, len(rates) + 1):
        losses = []
        for model, own, step_own in zip(models, batches, step_weights, strict=True):
            model.zero_grad()
            loss = loss_of(model, next(own))
            loss.backward()
            step_own(step - 1)
            losses.append(loss.item())
        if step in after:
            local.average()
        if step == len(rates):
            local.end()
        yield sum(losses) / len(losses), local
