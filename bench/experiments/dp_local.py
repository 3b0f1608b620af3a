"""Local steps of several ranks in one process, for dp_density.py.

Every rank has a model and an optimizer that sees its gradients alone. Every `period` steps the
ranks exchange what their weights have moved by since the last time. `Local` does so as
`DCTAverager`, and without overlap bit for bit as real ranks do. The others are the rules of other
systems, for comparison.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from dct_parallel.wire import all_gather_bytes, all_reduce_bytes

from . import dp_ranks
from .in_process import Buckets


class Averaging(dp_ranks.Counts):
    """Averages the models every `period` steps.

    Args:
        models: every rank's, with equal weights.
        period: steps.
        overlap: steps that ranks go on while an exchange runs. What weights have moved by in them
            is kept.
    Attributes:
        due: the steps to average after, where they are others than every `period`th.
    """

    due: Collection[int] | None = None

    def __init__(self, models: Sequence[nn.Module], period: int, overlap: int = 0) -> None:
        self.weights = [list(model.parameters()) for model in models]
        self.sizes = [weight.numel() for weight in self.weights[0]]
        self.ranks, self.period, self.overlap = len(models), period, overlap
        self.base = self._flat(0)
        self.sent_from: list[Tensor] = []  # every rank's weights when an exchange began
        self.arrives_after = 0  # this step

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        """To be called after step number `step`, from 1 up."""
        if step in self.due if self.due is not None else step % self.period == 0:
            self.arrives_after = step + self.overlap
            self.sent_from = [self._flat(rank) for rank in range(self.ranks)]
            self.base += self.change([weights - self.base for weights in self.sent_from])
        if step == self.arrives_after:
            self.arrive()

    @torch.no_grad()
    def arrive(self) -> None:
        """Let the ranks have what the last exchange brought, if they have not yet."""
        for weights, before in zip(self.weights, self.sent_from, strict=False):
            parts = zip(weights, self.base.split(self.sizes), before.split(self.sizes), strict=True)
            for weight, base, sent_from in parts:
                base, sent_from = base.view_as(weight), sent_from.view_as(weight)
                weight.copy_(base + (weight - sent_from) if self.overlap else base)
        self.sent_from = []

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
        overlap: int = 0,
        decay: float = 1.0,
        format: str = "bfloat16",
        transport: str = "all_gather",
    ) -> None:
        super().__init__(models, period, overlap)
        self.buckets = Buckets(self.sizes, self.ranks, density, format, transport)
        self.decay = decay

    def change(self, moved: Sequence[Tensor]) -> Tensor:
        mean = self.exchange(self.buckets, moved)
        torch._foreach_mul_(self.buckets.residuals(), self.decay)
        return mean


class Dense(Averaging):
    """Every entry in float32, and an outer optimizer: SGD with Nesterov's momentum.

    At rate 1 without momentum it is torch's PostLocalSGD; at rate .7 with momentum .9 DiLoCo
    (arXiv 2311.08105).
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        period: int,
        overlap: int = 0,
        rate: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        super().__init__(models, period, overlap)
        self.rate, self.momentum = rate, momentum
        self.velocity = torch.zeros_like(self.base)

    def change(self, moved: Sequence[Tensor]) -> Tensor:
        mean = sum(moved) / self.ranks
        self.sent += all_reduce_bytes(mean.nbytes, self.ranks)
        self.velocity.mul_(self.momentum).add_(mean)
        return self.rate * (mean + self.momentum * self.velocity)


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
        overlap: int = 0,
        decay: float = 0.95,
    ) -> None:
        super().__init__(models, period, overlap)
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


def equal_progress(rates: Sequence[float], period: int) -> set[int]:
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
            average.arrive()
        yield sum(losses) / len(losses), average
