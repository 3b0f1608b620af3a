"""Progress of a run: on the terminal a bar, or nothing but a line at the end."""

import contextlib
import math
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SMOOTHING = 0.98


@contextlib.contextmanager
def bar(
    console: Console | None, title: str, steps: int, done: int = 0
) -> Iterator[Callable[[float], None]]:
    """A function to be called with the loss after every step; it moves a bar on a terminal.

    Args:
        console: None on ranks that are to be silent.
        done: of the `steps`, before this.
    """
    if console is None or not console.is_terminal:
        yield lambda loss: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=steps, completed=done, loss="")
        smooth = None

        def on_step(loss: float) -> None:
            nonlocal smooth
            told = "loss not finite"
            if math.isfinite(loss):  # one that is not would stay in the mean for ever
                smooth = loss if smooth is None else _SMOOTHING * smooth + (1 - _SMOOTHING) * loss
                told = f"loss {smooth:.4f}"
            progress.update(task, advance=1, loss=told)

        yield on_step


def restore_terminal() -> None:
    """Where a process was ended that drew a bar: the cursor is back, on a line of its own."""
    console = Console()
    if console.is_terminal:
        console.show_cursor()
        console.print()
