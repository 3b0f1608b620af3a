"""bench/link.py: step time and bytes of training over links of a set rate."""

import argparse
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import provenance
from dlrm import files
from dlrm.command_line import results_folder
from dlrm.errors import UsageError
from rates import UNLIMITED, describe_rate, parse_rate
from tables import aligned

from . import plots, report
from .arguments import FOLDER, RESULT, ROUNDS
from .cells import Cell, merge
from .methods import HYBRID, METHODS
from .namespaces import Loopback, Namespaces
from .ranks import RankError, Ranks


def run(options: argparse.Namespace) -> int:
    """The subcommand: 0, or 1 if a cell failed."""
    if options.rates is None:
        default = [UNLIMITED] if options.loopback else ["100mbit", "1gbit", "10gbit", UNLIMITED]
        options.rates = [parse_rate(text) for text in default]
    if options.loopback and options.rates != [None]:
        raise UsageError(f"--loopback has no rate limit: --rates must be {UNLIMITED}")
    options.out = results_folder(options, FOLDER, RESULT, "step_time.png")
    _check_nodes(options)
    console = Console()
    console.out(report.announce(options), highlight=False)
    start = provenance.describe()
    links, cells, model = [], [], {}
    blocks = len(options.ranks) * len(options.rates) * len(options.modes) * ROUNDS
    with _progress(console, blocks) as on_block:
        for ranks in options.ranks:
            model, of_ranks, measured = _measure(ranks, options, on_block)
            links += of_ranks
            cells += measured
            result = _result(options, start, model, links, cells)
            of_these = [cell for cell in result["cells"] if cell["ranks"] == ranks]
            tables = report.render([result | {"cells": of_these}])
            console.out(f"{aligned(tables)}\n", highlight=False)
            for cell in (cell for cell in measured if cell.failed):
                at = f"{METHODS[cell.mode].title} at {describe_rate(cell.rate)}"
                console.out(f"{at} failed: {cell.failed}", highlight=False)
            files.write_json(options.out / RESULT, result)  # kept, whatever comes
            picture = plots.step_times(result)
            files.write_figure(options.out / "step_time.png", picture, dpi=120)
    console.out(f"{report.NOTE}\n", highlight=False)
    console.out("\n".join(report.describe_crossings(report.crossings(cells))), highlight=False)
    console.out(f"in {options.out}: link.json, step_time.png", highlight=False)
    return int(any(cell.failed for cell in cells))


def _check_nodes(options: argparse.Namespace) -> None:
    size = options.local_size
    if any(ranks % size or ranks == size for ranks in options.ranks):
        counts = ",".join(map(str, options.ranks))
        raise UsageError(f"--local-size must make several nodes of {counts} ranks, got {size}")
    if size > 1 and options.loopback:
        raise UsageError("--local-size must come without --loopback, where no link joins nodes")
    hybrid = [mode for mode in options.modes if mode in HYBRID]
    if size > 1 and hybrid:
        raise UsageError(f"--local-size must come without hybrid modes, got {', '.join(hybrid)}")


def _result(
    options: argparse.Namespace, start: dict, model: dict, links: list[dict], cells: list[Cell]
) -> dict:
    """Everything measured so far; `start` is the provenance when the run began."""
    return {
        "provenance": start | {"load_average_end": provenance.describe()["load_average"]},
        "options": {key: _plain(value) for key, value in vars(options).items()},
        "model": model,
        "links": links,
        "cells": [cell.as_json() for cell in cells],
        "crossings": report.crossings(cells),
    }


def _measure(
    ranks: int, options: argparse.Namespace, on_block
) -> tuple[dict, list[dict], list[Cell]]:
    """(model, links, cells) of one rank count."""
    keys = ("batch_size", "hash_size", "embedding_dim", "bottom", "top", "density", "row_density")
    keys += ("row_format", "bucket_mb")
    settings = {key: getattr(options, key) for key in keys}
    # What the training application takes by default.
    settings |= {"lr": 0.1, "refresh_every": 1000, "policy": "fresh", "format": "bfloat16"}
    settings |= {"transport": "all_gather", "local_size": 1}
    settings["node_ranks"] = options.local_size  # which only modes with a mesh know
    request = {
        "do": "train",
        "steps": math.ceil(options.steps / ROUNDS),
        "seconds": options.seconds / ROUNDS,
    }
    links, cells = [], []
    network = (Loopback if options.loopback else Namespaces)(ranks, options.local_size)
    with network, Ranks(network, ranks, settings) as workers:
        on_block(f"{ranks} ranks: starting", 0)
        model = workers.setup()
        for rate in options.rates:
            network.set_rate(rate)
            on_block(f"{ranks} ranks, {describe_rate(rate)}: plain transfer", 0)
            link = {"ranks": ranks, "local_size": options.local_size, "rate": rate}
            links.append(link | _transfer(workers, options))
            answers = {mode: [] for mode in options.modes}
            failed: dict[str, str] = {}
            for _ in range(ROUNDS):
                for mode in options.modes:
                    on_block(f"{ranks} ranks, {describe_rate(rate)}: {mode}", 1)
                    if mode in failed:
                        continue
                    try:
                        answers[mode].append(workers.ask(options.timeout, mode=mode, **request))
                    except RankError as error:
                        failed[mode] = str(error)
            for mode in options.modes:
                shared = ranks if options.loopback else options.local_size  # ranks on one counter
                cell = merge(ranks, rate, mode, answers[mode], shared, failed.get(mode))
                cells.append(cell)
    return model, links, cells


def _transfer(workers: Ranks, options: argparse.Namespace) -> dict:
    try:
        return workers.ask(options.timeout, do="transfer")[options.local_size]
    except RankError as error:
        raise UsageError(f"the plain transfer over the link failed: {error}") from None


@contextlib.contextmanager
def _progress(console: Console, blocks: int) -> Iterator:
    """A function of (what begins, how many blocks that is); it moves a bar on a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("", total=blocks)
        begun = 0

        def on_block(title: str, weight: int) -> None:
            nonlocal begun
            progress.update(task, description=title, completed=begun)
            begun += weight

        yield on_block


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
