"""Trains a click model on real ranks, for mp_formats.py and torchrec_dlrm.py."""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bench import files
from bench.cli import Parser, count, make_folder, positive, several, widths
from dlrm.data import dataset
from dlrm.launch import launch
from dlrm.scores import evaluate

from . import runs
from .runs import RATE_SEED, scores

# Trains on this rank. Arguments: exchange, learning rate of the tables, seed, data, options.
# Returns the model, its last loss, and the bytes that this rank sent per step, by purpose.
Job = Callable[..., tuple[nn.Module, float, dict[str, float]]]


def parser(name: str, description: str, exchanges: Sequence[str], known: Callable) -> Parser:
    """A parser for the options of both experiments. `known` is the argparse type of an exchange."""
    parser = Parser(prog=f"python -m bench.experiments.{name}", description=description)
    parser.set_defaults(problem="")
    add = parser.add_argument
    add("--exchanges", nargs="+", type=known, default=exchanges, metavar="EXCHANGE")
    add(
        "--rates", type=several(positive), default="0.3,1,3,10", help="learning rates of the tables"
    )
    add("--seeds", type=int, default=5, help="runs at the best rate; 0 uses no test rows")
    add("--ranks", type=count, default=2)
    add("--data", type=Path, metavar="FILE", help="rows in Criteo's layout")
    add("--rows", type=count, default=1_000_000, help="number of rows to generate without --data")
    add("--epochs", type=count, default=1)
    add("--batch-size", type=count, default=128, help="rows per rank and step")
    add("--lr", type=positive, default=0.1, help="learning rate of the MLPs (SGD)")
    add("--hash-size", type=count, default=4000, help="maximum rows per table")
    add("--embedding-dim", type=count, default=64)
    add("--bottom", type=widths, default="512-256-64", help="hidden widths of the bottom MLP")
    add("--top", type=widths, default="512-256", help="hidden widths of the top MLP")
    add("--out", type=Path, default=Path("runs", name), help="folder for runs with equal options")
    return parser


def train_by_rates(options: argparse.Namespace, job: Job) -> None:
    """Train one seed with all rates, then other seeds with the best rate. Report all runs."""
    make_folder(options.out)
    settings = settings_of(options)
    runs.load(options.out, settings)  # raises an error if a stored run has other settings
    _train(
        options, [(n, rate, RATE_SEED) for n in options.exchanges for rate in options.rates], job
    )
    records = runs.load(options.out, settings)
    best = {name: runs.best_rate(records, options.problem, name) for name in options.exchanges}
    seeds = range(RATE_SEED + 1, RATE_SEED + 1 + options.seeds)
    _train(options, [(n, r, s) for s in seeds for n, r in best.items() if r is not None], job)
    text = runs.tables(runs.load(options.out, settings))
    print(text)
    files.write(options.out / "report.md", text.encode())


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    names = ("ranks", "rows", "epochs", "batch_size", "lr", "hash_size", "embedding_dim")
    return runs.settings_of(options, *names, "bottom", "top")


def _train(
    options: argparse.Namespace, settings: Iterable[tuple[str, float, int]], job: Job
) -> None:
    wanted = [dict(zip(("method", "rate", "seed"), each, strict=True)) for each in settings]
    wanted = [run | {"problem": options.problem} for run in wanted]
    missing = [run for run in wanted if not runs.path(options.out, run).exists()]
    if missing:
        launch(_work, options.ranks, missing, options, job)


def _work(missing: Sequence[dict], options: argparse.Namespace, job: Job) -> None:
    """Execute this rank's part of all missing runs."""
    data = dataset.load(
        options.data, options.rows, options.hash_size, options.batch_size, validation_fraction=0.1
    )
    for run in missing:
        model, loss, sent = job(run["method"], run["rate"], run["seed"], data, options)
        sums = torch.tensor([loss, *sent.values()], dtype=torch.float64)
        dist.all_reduce(sums)
        loss, *means = (sums / options.ranks).tolist()
        record = run | {"settings": settings_of(options), "data": data.description}
        record["bytes"] = dict(zip(sent, means, strict=True))
        if math.isfinite(loss):
            record["validation"] = scores(evaluate(model, data.validation, data.train))
            if run["seed"] != RATE_SEED:
                record["test"] = scores(evaluate(model, data.test, data.train))
        else:
            record["diverged"] = True
        if dist.get_rank() == 0:
            file = runs.path(options.out, run)
            files.write_json(file, record)
            print(f"{file.stem}: {record.get('validation', 'diverged')}", flush=True)
        del model  # free the model before its process groups
