"""Tasks of dp_density.py on Python sources: a transformer from scratch, or fine-tuning."""

import io
from pathlib import Path

import torch
from torch import Tensor, nn

from bench import files
from bench.cli import UsageError

from . import python_corpus
from .dp_tasks import BATCH_TEXTS, CONTEXT, Transformer, next_character_loss

VALIDATION_TEXTS = 4000  # enough to choose by: differences vary less than losses. All of test are.
SCORED_AT_ONCE = 32  # texts; more of them leave the cache
START_STEPS, START_RATE = 1200, 4e-3  # of the model that is fine-tuned


class PythonTask:
    """Next characters of Python sources (python_corpus.py). No character is read twice.

    Args:
        width, layers: of the transformer.
        batch: texts of a rank and step.
        package: whose files are read; None for all packages.
    """

    def __init__(
        self,
        width: int = 96,
        layers: int = 3,
        batch: int = BATCH_TEXTS,
        package: str | None = None,
    ) -> None:
        sources = [s for s in python_corpus.installed() if s.path.startswith(package or "")]
        texts = python_corpus.windows(sources, CONTEXT + 1)
        self._train = texts["train"]
        self._scored = {
            "validation": _spread(texts["validation"], VALIDATION_TEXTS),
            "test": texts["test"],
        }
        self._make = lambda: Transformer(len(python_corpus.KNOWN), width, layers)
        self._batch = batch

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self._make()

    def batches(self, seed: int, rank: int, ranks: int):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self._train), generator=generator)[rank::ranks]
        for index in order.split(self._batch):
            yield self._train[index].long()
        raise UsageError(f"--steps must end before a rank's {len(order)} texts, each read once, do")

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return next_character_loss(model, batch)

    @torch.no_grad()
    def score(self, model: nn.Module, part: str) -> dict[str, float]:
        """{"loss": nats per character}."""
        batches = self._scored[part].split(SCORED_AT_ONCE)
        losses = [self.loss(model, batch.long()).item() * len(batch) for batch in batches]
        return {"loss": sum(losses) / len(self._scored[part])}


class FineTuneTask(PythonTask):
    """sympy's files for a model that was trained on torch's.

    Args:
        start: the model's file, written if it is not there.
        width, layers, batch: see `PythonTask`.
    """

    def __init__(
        self, start: Path, width: int = 96, layers: int = 3, batch: int = BATCH_TEXTS
    ) -> None:
        super().__init__(width, layers, batch, "sympy")
        if not start.exists():
            trained = io.BytesIO()
            torch.save(_trained(PythonTask(width, layers, batch, "torch")).state_dict(), trained)
            files.write(start, trained.getvalue())
        self._start = torch.load(start)

    def model(self, seed: int) -> nn.Module:
        model = super().model(seed)
        model.load_state_dict(self._start)
        return model


def _trained(task: PythonTask) -> nn.Module:
    """A model of the task, after START_STEPS on two ranks' batches without compression."""
    model = task.model(0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, START_RATE, START_STEPS, pct_start=0.05, cycle_momentum=False
    )
    ranks = [task.batches(0, rank, 2) for rank in range(2)]
    for _, *batches in zip(range(START_STEPS), *ranks, strict=False):
        optimizer.zero_grad()
        task.loss(model, torch.cat(batches)).backward()
        optimizer.step()
        schedule.step()
    return model


def _spread(texts: Tensor, count: int) -> Tensor:
    """`count` of the texts, at equal distances."""
    return texts[torch.arange(count) * len(texts) // count]
