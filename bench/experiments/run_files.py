"""Experiments on train_dlrm.py's training: a file for each finished run, and no run twice.

What their commands share. A run is trained on all ranks by a job, which says what its file is to
have.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from rich.console import Console
from torch import nn

from dlrm import arguments, files, loop, progress
from dlrm.argument_types import positive, several
from dlrm.command_line import Parser, make_folder
from dlrm.data import dataset
from dlrm.errors import UsageError, WorkerError
from dlrm.launch import launch

RATE_SEED = 0  # of runs that rates are chosen by


class Run(NamedTuple):
    """What is trained, with which learning rate of the tables, from which seed."""

    exchange: str
    rate: float
    seed: int

    @property
    def title(self) -> str:
        return f"{self.exchange}, lr {self.rate:g}"

    def path(self, folder: Path) -> Path:
        name = self.exchange.replace(",", "-").replace("/", "-").replace("%", "percent")
        return folder / f"{name}_lr{self.rate:g}_seed{self.seed}.json"


# (run, data, train_dlrm.py's options, what is to be called after every step) -> (what its file is
# to have, what is said of it; on the first rank).
Job = Callable[[Run, dataset.Dataset, argparse.Namespace, Callable], tuple[dict, str]]


def settings_of(options: argparse.Namespace, names: Collection[str]) -> dict[str, object]:
    """What must be equal in all runs of a folder: these options, ranks, and the rows' file."""
    settings = {name: getattr(options, name) for name in names} | {"ranks": options.ranks}
    settings["data"] = None if options.data is None else options.data.name
    return json.loads(json.dumps(settings))  # as it comes back from a file


def train(options: argparse.Namespace, runs: Iterable[Run], settings: dict, job: Job) -> None:
    """Those of `runs` that have no file in `options.out` yet."""
    runs = list(runs)
    while missing := [run for run in runs if not run.path(options.out).exists()]:
        try:
            launch(_work, options.ranks, options, missing, settings, job)
        except WorkerError as error:
            if "loss stays finite" not in str(error):
                raise
            run = next(run for run in missing if not run.path(options.out).exists())
            print(error)
            files.write_json(
                run.path(options.out), run._asdict() | {"settings": settings, "diverged": True}
            )


def _work(options: argparse.Namespace, runs: Sequence[Run], settings: dict, job: Job) -> None:
    """All of `runs`, on one rank; the first writes a file for each."""
    console = Console() if dist.get_rank() == 0 else None
    data = dataset.load(options)
    steps = options.epochs * data.description["steps_per_epoch"]
    described = {key: value for key, value in data.description.items() if key != "file"}
    for number, run in enumerate(runs, start=1):
        title = f"{number} of {len(runs)}: {run.title}, seed {run.seed}"
        start = time.time()
        with progress.bar(console, title, steps) as on_step:
            found, said = job(run, data, options, on_step)
        if console is not None:
            record = run._asdict() | {"settings": settings, "data": described} | found
            console.print(f"{title}: {said}", highlight=False)
            files.write_json(run.path(options.out), record | {"seconds": time.time() - start})
    dist.barrier()  # under torchrun every rank looks for the files next


def rated(
    mode: str, run: Run, data: dataset.Dataset, options: argparse.Namespace, on_step: Callable
) -> tuple[dict, str]:
    """Of a job: trained in `mode` and `scored`."""
    model, result = loop.train(mode, run.seed, data, options, on_step)
    found, said = scored(model, run, data)
    model.close()
    summary = result.summary()
    found |= {key: value for key, value in summary.items() if key.endswith("_per_rank")}
    return found | {"step_ms_median": summary["step_ms_median"]}, said


def scored(model: nn.Module, run: Run, data: dataset.Dataset) -> tuple[dict, str]:
    """Of a trained model, what a job gives of its scores: on validation rows; of other seeds than
    the one that rates are chosen by on test rows, too. Collective."""
    parts = {"validation": data.validation}
    if run.seed != RATE_SEED:
        parts["test"] = data.test
    scores = {name: loop.test(model, rows, data.train) for name, rows in parts.items()}
    found = {name: of_part._asdict() for name, of_part in scores.items()}
    if dist.get_rank() != 0:  # where there are no scores
        return found, ""
    said = [f"{name} AUC {s.auc:.4f}, log loss {s.log_loss:.4f}" for name, s in scores.items()]
    return found, "; ".join(said)


def train_by_rates(
    options: argparse.Namespace,
    args: argparse.Namespace,
    names: Sequence[str],
    settings: dict,
    job: Job,
) -> list[dict]:
    """All records, once everything was trained with every rate from the first seed, and at its best
    rate from the others."""
    make_folder(options.out)
    read(options.out, settings)
    first = itertools.product(names, args.rates, [RATE_SEED])
    train(options, itertools.starmap(Run, first), settings, job)
    rates = best_rates(read(options.out, settings))
    seeds = range(RATE_SEED + 1, RATE_SEED + 1 + args.seeds)
    second = itertools.product(seeds, [name for name in names if name in rates])
    train(options, [Run(name, rates[name], seed) for seed, name in second], settings, job)
    return read(options.out, settings)


def add_rates(parser: argparse.ArgumentParser, rates: Sequence[float], seeds: int) -> None:
    """--rates and --seeds, as `train_by_rates` has them."""
    parser.add_argument("--rates", type=several(positive), default=rates, help="of the tables")
    parser.add_argument(
        "--seeds",
        type=int,
        default=seeds,
        help="at the best rate; 0: rates only, no test row is read",
    )


def parse(
    parser: Parser, parallel: str, argv: Sequence[str] | None = None
) -> tuple[argparse.Namespace, argparse.Namespace]:
    """(train_dlrm.py's options, the command's own), of a command that chooses rates.

    Raises:
        UsageError: there are no rows to choose them by.
    """
    args, rest = parser.parse_known_args(argv)
    fixed = ["--parallel", parallel, "--out", str(args.out)]
    options = arguments.parse(["--validation-fraction", "0.1", *rest, *fixed])
    if not options.validation_fraction:
        raise UsageError("--validation-fraction must be above 0: rates are chosen on those rows")
    return options, args


def read(folder: Path, settings: dict) -> list[dict]:
    """The runs that are finished.

    Raises:
        UsageError: some have other settings, or are not whole.
    """
    records = []
    for path in sorted(folder.glob("*_seed*.json")):
        try:
            records.append(json.loads(path.read_bytes()))
        except ValueError:
            raise UsageError(f"{path} must be as it was written, got a changed file") from None
    for record in records:
        for key, value in settings.items():
            if record["settings"].get(key) != value:
                raise UsageError(
                    f"--out must hold runs of one setting, got {key} {record['settings'].get(key)} "
                    f"in {folder}, {value} asked for"
                )
    return records


def write_report(folder: Path, text: str) -> None:
    """Print it, and keep it."""
    print(f"\n{text}\n", flush=True)
    files.write(folder / "report.md", f"{text}\n".encode())
    print(f"in {folder}: report.md, a file for each run")


def best_rates(records: Sequence[dict]) -> dict[str, float]:
    """Of every exchange the rate that is best on validation rows."""
    found: dict[str, dict] = {}
    for record in records:
        if record["seed"] != RATE_SEED or "diverged" in record:
            continue
        best = found.setdefault(record["exchange"], record)
        if record["validation"]["log_loss"] < best["validation"]["log_loss"]:
            found[record["exchange"]] = record
    return {name: record["rate"] for name, record in found.items()}
