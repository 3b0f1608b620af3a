"""dct-bench link: step time and bytes of training over links of a set rate."""

import argparse
import contextlib
import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dct_dlrm.argument_types import (
    Formatter,
    count,
    density,
    number,
    positive,
    several,
    widths,
)
from dct_dlrm.errors import UsageError

from .. import provenance
from ..rates import UNLIMITED, describe_rate, parse_rate
from . import plots, report
from .cells import Cell, merge
from .methods import METHODS, REPLICATED
from .namespaces import ENDING_SIGNALS, Loopback, Namespaces
from .ranks import RankError, Ranks

ROUNDS = 3  # every mode gets a third of its steps in each, so that a busy moment hits all of them
PLAIN_WIDTH = 100  # of the output where there is no terminal to fit

DESCRIPTION = """\
Train DLRM on generated rows over links of a set rate, with several ways of averaging gradients,
and measure a step: its time, where that goes, and the bytes that leave a rank's interface.

Every rank is a process in a network namespace of its own. A link is a veth pair with a token bucket
filter at both ends (each direction has the full rate), and a bridge joins them. Bytes are read from
the interface's counters. Needs root and the commands ip and tc (Debian, Ubuntu: apt-get install
iproute2); --loopback measures without them, and without a rate limit. What was set up is removed
at the end, also after Ctrl-C; what a killed run left is removed by the next.
"""
EPILOG = """\
examples:
  sudo $(which dct-bench) link
      2 ranks, 100 Mbit/s to unlimited, all replicated modes: about 4 minutes
  sudo $(which dct-bench) link --ranks 2,4 --rates 1gbit,2.5gbit,5gbit,10gbit --modes dense,bf16,dct
      where does DCT stop paying?
  sudo $(which dct-bench) link --embedding-dim 64 --modes hybrid-dense,hybrid-dp,hybrid-dct
      tables sharded: what DCT on the exchange of embeddings adds to DCT on gradients
  dct-bench link --loopback
      no root: what the modes cost where the network costs next to nothing

DIR receives link.json (everything, with provenance), step_time.png and phases.png.
`dct-bench scale --validate DIR/link.json` holds the cost model against it.
"""


def add_parser(subparsers: argparse._SubParsersAction, name: str) -> None:
    parser = subparsers.add_parser(
        name,
        help="step time and bytes over links of a set rate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Formatter,
    )
    measured = parser.add_argument_group("what is measured")
    measured.add_argument(
        "--ranks",
        type=several(number(int, lambda n: 2 <= n <= 64, "an integer in [2, 64]")),
        default="2",
        metavar="N,...",
        help="rank counts; ranks share this machine's cores, so more of them than cores compute "
        "slower",
    )
    measured.add_argument(
        "--rates",
        type=several(parse_rate),
        metavar="R,...",
        help="link rates, such as 2.5gbit, or unlimited (default: 100mbit,1gbit,10gbit,unlimited; "
        "unlimited with --loopback)",
    )
    measured.add_argument(
        "--modes",
        type=several(str, METHODS),
        default=",".join(REPLICATED),
        metavar="M,...",
        help="float32 and bfloat16 all-reduce, PowerSGD of rank 1 and 2, exact top-k with error "
        "feedback (values and int32 indices in one all-gather), DCT; with embedding tables sharded "
        "over the ranks: hybrid-dense sends rows and gradients as float32, hybrid-dp has DCT on "
        "the MLPs' gradients, hybrid-dct on rows, too",
    )
    measured.add_argument(
        "--loopback",
        action="store_true",
        help="127.0.0.1 instead of namespaces and links: no root, no rate limit, and bytes that "
        "include all else that this machine sends to itself",
    )
    extent = parser.add_argument_group("how long")
    extent.add_argument(
        "--steps", type=count, default=60, help=f"timed steps per cell, in {ROUNDS} rounds"
    )
    extent.add_argument(
        "--seconds",
        type=positive,
        default=15.0,
        help="a cell's timed steps take about this at most; slow links get fewer, at least 15",
    )
    extent.add_argument(
        "--timeout",
        type=positive,
        default=120.0,
        help="seconds after which a round of a cell, warm-up included, is given up and its ranks "
        "killed",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--batch-size", type=count, default=128, help="rows per rank and step")
    model.add_argument("--hash-size", type=count, default=4000, help="rows of a table at most")
    model.add_argument("--embedding-dim", type=count, default=16, help="width of an embedding")
    mlp = {"type": widths, "metavar": "W-W-..."}
    model.add_argument("--bottom", default="512-256-64", help="bottom MLP's hidden widths", **mlp)
    model.add_argument("--top", default="512-256", help="top MLP's hidden widths", **mlp)
    model.add_argument(
        "--density",
        type=density,
        default=0.005,
        help="DCT and exact top-k: fraction of entries sent",
    )
    model.add_argument(
        "--mp-density",
        type=density,
        default=0.05,
        help="hybrid-dct: fraction of each pooled embedding sent, and of its gradient, rounded up",
    )
    parser.add_argument(
        "--out", type=Path, default="runs/link", metavar="DIR", help="folder for the results"
    )


def run(options: argparse.Namespace) -> int:
    """The subcommand: 0, or 1 if a cell failed."""
    if options.rates is None:
        default = [UNLIMITED] if options.loopback else ["100mbit", "1gbit", "10gbit", UNLIMITED]
        options.rates = [parse_rate(text) for text in default]
    if options.loopback and options.rates != [None]:
        raise UsageError(f"--loopback has no rate limit: --rates must be {UNLIMITED}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out must be a folder that can be made: {error}") from None
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    start = provenance.describe()
    links, cells, model = [], [], {}
    blocks = len(options.ranks) * len(options.rates) * len(options.modes) * ROUNDS
    with _ended_by_signals(), _progress(console, blocks) as on_block:
        for ranks in options.ranks:
            model, of_ranks, measured = _measure(ranks, options, on_block)
            links += of_ranks
            cells += measured
            report.print_tables(console, of_ranks, measured)
            _write(options, start, model, links, cells)  # kept, should a later one be interrupted
    report.print_crossings(console, report.crossings(cells))
    console.print(f"in {options.out}: link.json, step_time.png, phases.png", style="dim")
    return int(any(cell.failed for cell in cells))


def _write(
    options: argparse.Namespace, start: dict, model: dict, links: list[dict], cells: list[Cell]
) -> None:
    """Everything measured so far; `start` is the provenance when the run began."""
    result = {
        "provenance": start | {"load_average_end": provenance.describe()["load_average"]},
        "options": {key: _plain(value) for key, value in vars(options).items()},
        "model": model,
        "links": links,
        "cells": [cell.as_json() for cell in cells],
        "crossings": report.crossings(cells),
    }
    (options.out / "link.json").write_text(json.dumps(result, indent=1) + "\n")
    plots.step_times(options.out / "step_time.png", cells)
    plots.phases(options.out / "phases.png", cells)


def _measure(
    ranks: int, options: argparse.Namespace, on_block
) -> tuple[dict, list[dict], list[Cell]]:
    """(model, links, cells) of one rank count."""
    keys = ("batch_size", "hash_size", "embedding_dim", "bottom", "top", "density", "mp_density")
    settings = {key: getattr(options, key) for key in keys}
    # What the training application takes by default.
    settings |= {"lr": 0.1, "refresh_every": 1000, "policy": "tracked"}
    request = {
        "do": "train",
        "steps": math.ceil(options.steps / ROUNDS),
        "seconds": options.seconds / ROUNDS,
    }
    links, cells = [], []
    network = Loopback(ranks) if options.loopback else Namespaces(ranks)
    with network, Ranks(network, ranks, settings) as workers:
        on_block(f"{ranks} ranks: starting", 0)
        model = workers.setup()
        for rate in options.rates:
            network.set_rate(rate)
            on_block(f"{ranks} ranks, {describe_rate(rate)}: plain transfer", 0)
            links.append({"ranks": ranks, "rate": rate} | _transfer(workers, options.timeout))
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
                shared = ranks if options.loopback else 1  # ranks on one counter
                cell = merge(ranks, rate, mode, answers[mode], shared, failed.get(mode))
                cells.append(cell)
    return model, links, cells


def _transfer(workers: Ranks, timeout: float) -> dict:
    try:
        return workers.ask(timeout, do="transfer")[1]
    except RankError as error:
        raise UsageError(f"the plain transfer over the link failed: {error}") from None


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP do as Ctrl-C does: an exception, so that contexts are left, in order."""
    before = [signal.signal(number, signal.default_int_handler) for number in ENDING_SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(ENDING_SIGNALS, before, strict=True):
            signal.signal(number, handler)


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
