"""Trains on batches, and records the loss, time and bytes of each step."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Optimizer

from .data.features import Rows
from .errors import UsageError
from .ranks import from_all_ranks
from .traffic import Traffic


@dataclasses.dataclass(frozen=True)
class Record:
    """Measurements of each step, float64 [steps].

    Attributes:
        loss: training loss, mean over ranks.
        step_ms: milliseconds from batch to updated weights on this rank.
        sent: {purpose: bytes sent per rank, mean over ranks}.
    """

    loss: np.ndarray
    step_ms: np.ndarray
    sent: dict[str, np.ndarray]

    @property
    def total(self) -> np.ndarray:
        """The total bytes of each step over all purposes."""
        return sum(self.sent.values())


def train(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    batches: Iterable[Rows],
    groups: Mapping[str, dist.ProcessGroup],
    on_step: Callable[[], object],
    after_step: Callable[[], object] = lambda: None,
) -> Record:
    """Train the model on this rank's batches. Collective.

    Args:
        groups: as in `Traffic`.
        on_step: called after each step.
        after_step: called at the end of each step, after the optimizers.
    """
    losses: list[float] = []
    step_ms: list[float] = []
    with Traffic(groups) as traffic:
        for step, batch in enumerate(batches):
            start = time.perf_counter()
            model.zero_grad()
            logits = model(batch.ints, batch.ids)
            traffic.forward_done()
            loss = binary_cross_entropy_with_logits(logits, batch.labels.float())
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            after_step()
            step_ms.append(1e3 * (time.perf_counter() - start))
            traffic.step_done()
            losses.append(loss.item())
            if not np.isfinite(losses[-1]):
                raise UsageError(
                    "--lr and --embedding-lr must be small enough for a finite loss, got a loss of "
                    f"{losses[-1]} in step {step}"
                )
            on_step()
    sent = {name: _mean([step[name] for step in traffic.steps]) for name in traffic.steps[0]}
    return Record(_mean(losses), np.array(step_ms), sent)


def require_equal_weights(digest: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise an error if `digest` differs between the ranks of the group. Collective."""
    digests = from_all_ranks(digest, group)
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise RuntimeError(
            f"weights must be equal on all ranks, got different ones on ranks {different}"
        )


def _mean(values: list[float]) -> np.ndarray:
    """The mean of `values` over ranks."""
    mean = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).numpy()
