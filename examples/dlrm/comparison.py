"""Runs the comparison on one rank, and implements the command that starts the ranks."""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from dct_kernels import backend_of

from . import report
from .arguments import ADAMW, parse
from .data import criteo
from .data.dataset import Dataset, load
from .errors import RankError, UsageError
from .launch import is_first, launch
from .loop import run
from .scores import score_all_ranks

PLAIN_WIDTH = 120  # columns of output, except on terminals


def main(arguments: Sequence[str] | None = None) -> int:
    """Run train_dlrm.py and return its exit status."""
    return run_program("train_dlrm.py", compare, parse(arguments))


def run_program(name: str, work: Callable[..., None], options: argparse.Namespace) -> int:
    """Check the data file and the results folder, then call `work(options)` on all ranks.

    Returns:
        The exit status. The reason of a failure is printed on stderr.
    """
    try:
        if options.data is not None:
            criteo.check_file(options.data)
        if is_first() and "out" in options:
            _make_folder(options.out, options.overwrite)
        launch(work, options.ranks, options)
    except (UsageError, RankError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    return 0


def compare(options: argparse.Namespace) -> None:
    """Run all modes with all seeds. Rank 0 prints and writes the results. Collective."""
    console, start = make_console(), time.monotonic()
    data = load(options.data, options.rows, options.hash_size, options.batch_size)
    describe(console, data)
    bayes = None
    if data.probability is not None:
        bayes = score_all_ranks(data.test.labels.numpy(), data.probability)
    runs: report.Runs = {}
    for seed in range(options.seeds):
        for mode in options.modes:
            with progress(console, f"{mode} seed {seed}", data) as on_step:
                result = run(mode, seed, data, options, on_step)
            runs.setdefault(mode, []).append(result)
            if console is not None:  # so that an interrupted command keeps results
                console.print(report.line(mode, result), markup=False, highlight=False)
                report.write_summary(options.out, _config(options), data.description, runs, bayes)
                report.write_curves(options.out, runs)
    if console is not None:
        report.print_table(console, runs, bayes)
        if text := report.conclusion(runs):
            console.print(f"{text}\n", markup=False, highlight=False)
        if options.optimizer != "adamw":
            text = f"To try AdamW with int4, add {ADAMW} (make train OPTIONS='{ADAMW}')."
            console.print(text, markup=False, highlight=False)
        minutes, seconds = divmod(round(time.monotonic() - start), 60)
        console.print(f"Total time: {minutes} min {seconds} s", highlight=False)
        console.print(f"Results: {options.out}/{report.SUMMARY}, {report.CURVES}", style="dim")


def make_console() -> Console | None:
    """The console of rank 0; None on other ranks."""
    if dist.get_rank() != 0:
        return None
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def describe(console: Console | None, data: Dataset) -> None:
    """Print the source of the rows, the numbers of rows and steps, and skipped lines."""
    if console is None:
        return
    if data.warning is not None:
        console.print(data.warning, style="yellow", markup=False)
    counts = data.description
    source = f"rows of {counts['file']}" if "file" in counts else "generated rows (no real data)"
    console.print(
        f"{source}: {counts['train_rows']:,} for training, {counts['test_rows']:,} for the test; "
        f"{dist.get_world_size()} ranks, {counts['steps']:,} steps; backend: {backend_of('cpu')}",
        markup=False,
    )


@contextlib.contextmanager
def progress(console: Console | None, title: str, data: Dataset) -> Iterator[Callable[[], object]]:
    """Show progress and the time left, as a bar on a terminal. Yield a function for each step."""
    steps, is_terminal = data.description["steps"], console is not None and console.is_terminal
    with Progress(console=console, transient=True, disable=not is_terminal) as bar:
        bar.add_task(title, total=steps)
        (task,) = bar.tasks

        def on_step() -> None:
            quarter = 4 * int(task.completed) // steps
            bar.advance(task.id)
            if console is None or is_terminal or not quarter < 4 * int(task.completed) // steps < 4:
                return
            left = f"{task.percentage:.0f} %, {task.time_remaining or 0:.0f} s left"
            console.print(f"{title}: {left}", markup=False, highlight=False)

        yield on_step


def _make_folder(folder: Path, overwrite: bool) -> None:
    """Create the folder for results before the work starts."""
    summary, probe = folder / report.SUMMARY, folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if summary.exists() and not overwrite:
            raise UsageError(
                f"--out must not contain {report.SUMMARY}, got {folder}: use --overwrite to "
                "replace it"
            )
        summary.unlink(missing_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--out must be a writable folder, got {folder}: {error}") from None


def _config(options: argparse.Namespace) -> dict[str, object]:
    plain = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(options).items()
    }
    return plain | {
        "ranks": dist.get_world_size(),
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
    }
