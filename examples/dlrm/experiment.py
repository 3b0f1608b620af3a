"""All runs of a comparison, on one rank."""

import argparse

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from . import plot, progress, report
from .checkpoint import Checkpoints
from .data.dataset import Dataset, load
from .errors import UsageError
from .loop import Run, gather_rows, run, score
from .parallel import describe, plan_tables
from .ranks import from_all_ranks

# Options with which a command may go on that differ from those it was started with.
NOT_IN_CHECKPOINTS = ("out", "overwrite", "checkpoint_every", "resume", "ranks")
PLAIN_WIDTH = 100  # of the output where there is no terminal to fit


def compare(options: argparse.Namespace) -> None:
    """Run every mode from every seed; rank 0 reports and writes the results. Collective."""
    console = _console() if dist.get_rank() == 0 else None
    data = load(options)
    if console is not None:
        if data.warning is not None:
            console.print(data.warning, style="yellow", markup=False)
        console.print(_heading(data), markup=False)
        if options.parallel != "data":
            console.print(_plan(options), markup=False, highlight=False)
    bayes = _bayes(data)
    saving = options.checkpoint_every is not None
    checkpoints = _checkpoints(options, data) if saving or options.resume else None
    saved = checkpoints.load() if options.resume else None
    finished, training = (saved["finished"], saved["training"]) if saved else ([], None)

    def save(training: dict | None) -> None:
        checkpoints.save({"finished": finished, "training": training})

    runs: report.Runs = {}
    for mode, result in finished:
        runs.setdefault(mode, []).append(Run.restored(result))
    if saved and console is not None:
        if runs:
            _write(options, data, runs, bayes)
        console.print(_going_on(saved), markup=False, highlight=False)
    for seed in range(options.seeds):
        for mode in options.modes:
            if len(runs.get(mode, [])) > seed:
                continue
            steps = options.epochs * data.description["steps_per_epoch"]
            done = len(training["noted"]["losses"]) if training else 0
            title = f"{mode} seed {seed}"
            with progress.bar(console, title, steps, done) as on_step:
                result = run(mode, seed, data, options, on_step, training, save if saving else None)
            training = None
            runs.setdefault(mode, []).append(result)
            if saving:
                finished.append((mode, result.saved()))
                save(None)
            if console is not None:
                try:
                    _write(options, data, runs, bayes)
                except UsageError:
                    report.print_table(console, runs, bayes, options.local_size)
                    raise
                console.print(report.line(mode, result), markup=False, highlight=False)
    if console is not None:
        report.print_table(console, runs, bayes, options.local_size)
        console.print(f"in {options.out}: summary.json, history.json, curves.png", style="dim")


def _write(
    options: argparse.Namespace, data: Dataset, runs: report.Runs, bayes: report.Bayes | None
) -> None:
    """After every run: what is finished is kept, whatever comes."""
    report.write_summary(options.out, _config(options), data.description, runs, bayes)
    report.write_history(options.out, runs)
    plot.write_curves(options.out, runs)


def _checkpoints(options: argparse.Namespace, data: Dataset) -> Checkpoints:
    settings = {
        f"--{name.replace('_', '-')}": value
        for name, value in _plain(options).items()
        if name not in NOT_IN_CHECKPOINTS
    }
    settings |= {"--ranks": dist.get_world_size()} | data.description
    return Checkpoints(from_all_ranks(options.out)[0], settings)


def _going_on(saved: dict) -> str:
    done = len(saved["training"]["noted"]["losses"]) if saved["training"] else 0
    return f"goes on after {len(saved['finished'])} finished runs and {done:,} steps of the next"


def _bayes(data: Dataset) -> report.Bayes | None:
    """What the true probabilities score on the test rows, on rank 0; None elsewhere."""
    if data.probability is None:
        return None
    gathered = gather_rows(np.stack([data.test.labels.numpy(), data.probability], axis=1))
    return None if gathered is None else score(gathered[:, 0], gathered[:, 1])


def _config(options: argparse.Namespace) -> dict[str, object]:
    return _plain(options) | {
        "ranks": dist.get_world_size(),
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _plain(options: argparse.Namespace) -> dict[str, object]:
    return {
        key: str(value) if key in ("data", "out") and value is not None else value
        for key, value in vars(options).items()
    }


def _heading(data: Dataset) -> str:
    counts = data.description
    names = ("train", "training"), ("validation", "validation"), ("test", "test")
    rows = [
        f"{counts[f'{key}_rows']:,} {name} rows" for key, name in names if f"{key}_rows" in counts
    ]
    return (
        f"{', '.join(rows)}; {dist.get_world_size()} ranks, "
        f"{counts['steps_per_epoch']:,} steps an epoch"
    )


def _plan(options: argparse.Namespace) -> str:
    if options.parallel == "des":
        made = options.dynamic_rows and f", as they appear, up to {options.dynamic_rows:,} a rank"
        return f"rows of all tables on all ranks, by a hash{made or ''}"
    text = describe(plan_tables(options))
    if options.parallel == "2d":
        text += f"\nof each of {options.replicas} groups of ranks"
    return text


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)
