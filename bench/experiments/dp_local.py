"""Local steps of several ranks in one process, for dp_density.py.

Every rank has a model and an optimizer that sees its gradients alone. Every `period` steps the
ranks exchange what their weights have moved by since the last time. `Local` does so as
`DCTAverager`, bit for bit as real ranks do. The others are the rules of other
systems, for comparison.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from dct_parallel.wire import all_gather_bytes, all_reduce_bytes

from . import dp_ranks
from .in_process import Buckets

MOMENTS = {None: (), "first": ("exp_avg",), "second": ("exp_avg_sq",)}
MOMENTS["both"] = MOMENTS["first"] + MOMENTS["second"]


class Averaging(dp_ranks.Counts):
    """Averages the models every `period` steps.

    Args:
        models: every rank's, with equal weights.
        period: steps.
        outer, momentum: rate and momentum of an outer optimizer, SGD with Nesterov's momentum,
            whose gradient is the mean change. At rate 1 without momentum it does nothing.
        moments: of Adam, that are averaged as well, in float32: "first", "second" or "both".
        pull: of a rank's deviation from the mean of Adam's first moments, so much is taken off,
            as its weights' deviation tells; the best for few steps is 1.1.
    Attributes:
        due: the steps to average after, where they are others than every `period`th.
        optimizers: every rank's, where moments are averaged.
    """

    due: Collection[int] | None = None
    optimizers: Sequence[torch.optim.Optimizer] = ()

    def __init__(
        self,
        models: Sequence[nn.Module],
        period: int,
        outer: float = 1.0,
        momentum: float = 0.0,
        moments: str | None = None,
        pull: float = 0.0,
    ) -> None:
        self.weights = [list(model.parameters()) for model in models]
        self.sizes = [weight.numel() for weight in self.weights[0]]
        self.ranks, self.period = len(models), period
        self.base = self._flat(0)
        self.outer, self.momentum = outer, momentum
        self.velocity = torch.zeros_like(self.base)
        self.moments = MOMENTS[moments]
        self.pull, self.rates = pull, 0.0

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        """To be called after step number `step`, from 1 up."""
        if self.pull:
            self.rates += self.optimizers[0].param_groups[0]["lr"]
        if step in self.due if self.due is not None else step % self.period == 0:
            moved = [self._flat(rank) - self.base for rank in range(self.ranks)]
            mean = self.change(moved)
            if self.pull:
                self.pull_moments(moved, mean)
            self.velocity.mul_(self.momentum).add_(mean)
            self.base += self.outer * (mean + self.momentum * self.velocity)
            for name in self.moments:
                self.average_moments(name)
            for rank in range(self.ranks):
                self.set(rank, self.start_of(rank))

    def start_of(self, rank: int) -> Tensor:
        """The weights that a rank goes on from."""
        return self.base

    @torch.no_grad()
    def set(self, rank: int, flat: Tensor) -> None:
        for weight, part in zip(self.weights[rank], flat.split(self.sizes), strict=True):
            weight.copy_(part.view_as(weight))

    def end(self) -> None:
        """Training ends."""

    def average_moments(self, name: str) -> None:
        """Let every rank have the mean of what their optimizers keep under this name."""
        for of_ranks in zip(*self.weights, strict=True):
            pairs = zip(self.optimizers, of_ranks, strict=True)
            own = [optimizer.state[weight][name] for optimizer, weight in pairs]
            mean = sum(own) / self.ranks
            for moment in own:
                moment.copy_(mean)
            self.sent += all_reduce_bytes(mean.nbytes, self.ranks)

    def pull_moments(self, moved: Sequence[Tensor], mean: Tensor) -> None:
        """Take off every rank's first moments what they have over the mean, as weights tell."""
        for optimizer, weights, own in zip(self.optimizers, self.weights, moved, strict=True):
            beta1, beta2 = optimizer.param_groups[0]["betas"]
            parts = (own - mean).split(self.sizes)
            for weight, part in zip(weights, parts, strict=True):
                state = optimizer.state[weight]
                step = state["step"].item()
                scale = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_()
                scale *= self.pull * (1 - beta1**step) / self.rates
                state["exp_avg"].addcmul_(part.view_as(weight), scale)
        self.rates = 0.0

    def change(self, moved: Sequence[Tensor]) -> Tensor:
        """Of the base, by what every rank's weights have moved by [numel]."""
        raise NotImplementedError

    def _flat(self, rank: int) -> Tensor:
        return torch.cat([weight.detach().flatten() for weight in self.weights[rank]])


class Local(Averaging):
    """What `DCTAverager` does.

    Args:
        density: of what weights have moved by.
        decay: of the residual, from one averaging to the next.
        format, transport: see `Buckets`.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        density: float,
        period: int,
        decay: float = 1.0,
        format: str = "bfloat16",
        transport: str = "all_gather",
        **settings,
    ) -> None:
        super().__init__(models, period, **settings)
        self.buckets = Buckets(self.sizes, self.ranks, density, format, transport)
        self.decay = decay

    def change(self, moved: Sequence[Tensor]) -> Tensor:
        mean = self.exchange(self.buckets, moved)
        torch._foreach_mul_(self.buckets.residuals(), self.decay)
        return mean


class Dense(Averaging):
    """Every entry in float32: without an outer optimizer torch's PostLocalSGD; at the outer rate
    .7 with momentum .9 DiLoCo (arXiv 2311.08105).
    """

    def change(self, moved: Sequence[Tensor]) -> Tensor:
        mean = sum(moved) / self.ranks
        self.sent += all_reduce_bytes(mean.nbytes, self.ranks)
        return mean


class SparseLoCo(Averaging):
    """SparseLoCo (arXiv 2508.15706), after templar's code: the largest of every 4,096 entries of a
    parameter, in 2 bits, with a codebook a parameter; the residual decays; a mean over senders.

    Bytes are counted at 12 + 2 bits an entry, and four float32 values a codebook.
    """

    CHUNK, LEVELS, SIGMAS = 4096, 4, 3

    def __init__(
        self,
        models: Sequence[nn.Module],
        density: float,
        period: int,
        decay: float = 0.95,
        **settings,
    ) -> None:
        super().__init__(models, period, **settings)
        self.density, self.decay = density, decay
        self.residuals = [torch.zeros_like(self.base) for _ in models]

    def change(self, moved: Sequence[Tensor]) -> Tensor:
        sent = []
        for residual, own in zip(self.residuals, moved, strict=True):
            residual.mul_(self.decay).add_(own)
            sent.append(torch.cat([self._compressed(part) for part in residual.split(self.sizes)]))
            residual -= sent[-1]
        entries = max(int((own != 0).sum()) for own in sent)
        self.sent += all_gather_bytes(entries * 14 // 8 + 16 * len(self.sizes), self.ranks)
        return mean_over_senders(torch.stack(sent))

    def _compressed(self, parameter: Tensor) -> Tensor:
        sparse = torch.zeros_like(parameter)
        for chunk, kept in zip(parameter.split(self.CHUNK), sparse.split(self.CHUNK), strict=True):
            largest = chunk.abs().topk(max(1, round(self.density * len(chunk)))).indices
            kept[largest] = chunk[largest]
        chosen = sparse != 0
        values = sparse[chosen]
        if len(values) > 1:
            width = 2 * self.SIGMAS * values.std() / self.LEVELS
            codes = ((values - values.mean()) / width + self.LEVELS / 2).floor()
            codes = codes.clamp_(0, self.LEVELS - 1).long()
            sums = torch.zeros(self.LEVELS).index_add_(0, codes, values)
            codebook = sums / torch.bincount(codes, minlength=self.LEVELS).clamp(min=1)
            sparse[chosen] = codebook[codes]
        return sparse


def schedule(
    rates: Sequence[float], period: int, spaced: str | None = None, first: int = 0
) -> set[int]:
    """Steps to average after: as many as every `period`th.

    Args:
        rates: every step's.
        spaced: "rate": further apart where the rate is lower; "rate2": by its square; "root": by
            its root.
        first: so many steps at the start are each followed by an averaging.
    """
    power = {None: 0, "root": 0.5, "rate": 1, "rate2": 2}[spaced]
    left = len(rates) // period - first
    later = [rate**power for rate in rates[first:]]
    due = equal_progress(later, len(later) / left) if left else set()
    return {*range(1, first + 1), *(first + step for step in due)}


def equal_progress(rates: Sequence[float], period: float) -> set[int]:
    """Steps to average after: as many as every `period`th, further apart where the rate is lower.

    Args:
        rates: every step's. Between two averagings they add up to the same.
    """
    progress = [0.0, *itertools.accumulate(rates)]
    share = progress[-1] * period / len(rates)
    pairs = enumerate(itertools.pairwise(progress), start=1)
    due = {step for step, (before, after) in pairs if after // share > before // share}
    return due | {len(rates)}


def mean_over_senders(sent: Tensor) -> Tensor:
    """[numel] of [ranks, numel]: each entry's mean over the ranks that sent it."""
    return sent.sum(0) / (sent != 0).sum(0).clamp(min=1)


def train(
    models: Sequence[nn.Module],
    loss_of: Callable[[nn.Module, object], Tensor],
    batches: Sequence[Iterator],
    average: Averaging,
    step_weights: Sequence[Callable[[int], None]],
    steps: int,
) -> Iterator[tuple[float, dp_ranks.Counts]]:
    """As `dp_ranks.train`, but every rank has a model, and an optimizer that sees its gradients
    alone."""
    for step in range(steps):
        losses = []
        for model, own, step_own in zip(models, batches, step_weights, strict=True):
            model.zero_grad()
            loss = loss_of(model, next(own))
            loss.backward()
            step_own(step)
            losses.append(loss.item())
        average(step + 1)
        if step + 1 == steps:
            average.end()
        yield sum(losses) / len(losses), average
