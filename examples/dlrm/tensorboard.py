"""Curves of a run while it goes on, for TensorBoard: on rank 0, of what it computed and sent.

Tags: loss, bytes (of a step), density and overflow (DCT, of the last 100 steps), and for each of
its parameters what `DCTState.parameter_stats` tells; in the end AUC and log loss.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from .loop import Run
from .progress import Step

EVERY, EVERY_OF_PARAMETERS = 10, 100  # steps between points
FLUSH_SECONDS = 10  # what is lost of the curves of a rank that is killed


@contextlib.contextmanager
def curves(folder: Path, done: int) -> Iterator[Callable[[Step], None]]:
    """A function to be called after every step.

    Args:
        done: steps taken before this. Points beyond, of a rank that was killed there, are dropped.
    """
    with _writer(folder, purge_step=done + 1, flush_secs=FLUSH_SECONDS) as writer:

        def on_step(step: Step) -> None:
            if step.number % EVERY:
                return
            values = {"loss": step.loss, "bytes": step.wire_bytes}
            if step.dct is not None:
                stats = step.dct.stats()
                values |= {name: stats[name] for name in ("density", "overflow")}
                if step.number % EVERY_OF_PARAMETERS == 0:
                    for name, figures in step.dct.parameter_stats().items():
                        values |= {f"{key}/{name}": value for key, value in figures.items()}
            for name, value in values.items():
                if value is not None:  # a density before compression starts
                    writer.add_scalar(name, value, step.number)

        yield on_step


def write_scores(folder: Path, run: Run) -> None:
    """What the test of a run gave."""
    with _writer(folder) as writer:
        writer.add_scalar("AUC", run.auc, len(run.loss))
        writer.add_scalar("log loss", run.log_loss, len(run.loss))


def _writer(folder: Path, **settings):
    from torch.utils.tensorboard import SummaryWriter  # here: an extra that few have

    return SummaryWriter(folder, **settings)
