"""A progress bar that shows the smoothed loss, on terminals only."""

import contextlib
import math
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

_SMOOTHING = 0.98


@contextlib.contextmanager
def bar(console: Console | None, title: str, steps: int) -> Iterator[Callable[[float], None]]:
    """Yield a function to call with the loss after each step.

    Args:
        console: None on ranks that print nothing.
    """
    if console is None or not console.is_terminal:
        yield lambda loss: None
        return
    columns = (
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=steps, loss="")
        smooth = math.nan

        def on_step(loss: float) -> None:
            nonlocal smooth
            smooth = loss if math.isnan(smooth) else _SMOOTHING * smooth + (1 - _SMOOTHING) * loss
            progress.update(task, advance=1, loss=f"loss {smooth:.4f}")

        yield on_step
