"""Accordion and SAEF for dp_density.py: the rules of others, with DCT's messages of all weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dct_parallel.wire import all_reduce_bytes

from . import dp_local, dp_ranks
from .in_process import Buckets

CRITICAL = 0.5  # change of the gradient's norm, as a part of what it was


class Accordion(dp_ranks.Exchange):
    """More is sent in critical regimes (arXiv 2010.16248; our reconstruction, after its code).

    After every window the first rank compares the norm of the sum of its own gradients in it with
    the window before. If it has changed by half, the next window is critical; the first one is.
    What is pending stays where the density changes. There, layers decide alone, and a decay of the
    rate begins a critical regime: a cosine has none.

    Args:
        shapes, ranks: see `Exchange`.
        density, format: see `DCTState`.
        critical, critical_format: the same in critical windows, the density in percent.
        window: steps.
        transport: see `Buckets`.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        ranks: int,
        density: float = 1.0,
        critical: float = 100.0,
        format: str = "bfloat16",
        critical_format: str = "bfloat16",
        window: int = 50,
        transport: str = "all_gather",
    ) -> None:
        super().__init__(shapes, ranks)
        self.usual, self.critical = (density, format), (critical / 100, critical_format)
        self.window, self.transport = window, transport
        self.sum, self.steps, self.before = 0, 0, 0.0
        self.sends = self.critical
        self.buckets = Buckets(self.sizes, ranks, *self.sends, transport)

    def start(self, grads: Sequence[Tensor]) -> Tensor:
        return self.all_reduce(grads, torch.bfloat16)

    def mean(self, grads: Sequence[Tensor]) -> Tensor:
        if self.steps == self.window:
            self.begin_window()
        self.sum, self.steps = self.sum + grads[0], self.steps + 1
        return self.exchange(self.buckets, grads)

    def begin_window(self) -> None:
        norm = self.sum.norm().item()
        changed = abs(self.before - norm) >= CRITICAL * self.before
        sends = self.critical if changed else self.usual
        if sends != self.sends:
            states = self.buckets.states()
            self.buckets = Buckets(self.sizes, self.ranks, *sends, self.transport, states)
        self.sends, self.before, self.sum, self.steps = sends, norm, 0, 0


class StepAhead(dp_local.Local):
    """SAEF (arXiv 2008.05823; our reconstruction, after its code): step ahead, average errors.

    Every rank takes a step of its own optimizer, or some, from weights to which its residual has
    been added, and the ranks exchange these steps, with error feedback. By reduce-scatter the mean
    is compressed once more, as by the server there. On the way, scores are of weights that are
    ahead.

    Args:
        density, format, transport: see `Local`.
        share: after so many exchanges all residuals become their mean, in float32; 0: never.
        every: steps from one exchange to the next.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        density: float,
        format: str = "bfloat16",
        transport: str = "all_gather",
        share: int = 0,
        every: int = 1,
    ) -> None:
        super().__init__(models, density, every, format=format, transport=transport)
        self.share, self.steps = share, 0
        self.ahead = [torch.zeros_like(self.base) for _ in models]

    def change(self, moved: Sequence[Tensor]) -> Tensor:
        steps = [own - ahead for own, ahead in zip(moved, self.ahead, strict=True)]
        mean = super().change(steps)
        self.steps += 1
        residuals = self.buckets.unsent()
        if self.share and self.steps % self.share == 0:
            shared = sum(residuals) / self.ranks
            for residual in residuals:
                residual.copy_(shared)
            self.sent += all_reduce_bytes(shared.nbytes, self.ranks)
        self.ahead = [residual.clone() for residual in residuals]
        return mean

    def start_of(self, rank: int) -> Tensor:
        return self.base + self.ahead[rank]

    def end(self) -> None:
        """Back to what all ranks have."""
        for rank in range(self.ranks):
            self.set(rank, self.base)
