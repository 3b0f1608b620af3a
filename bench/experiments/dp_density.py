"""Measures the quality of data-parallel training with different optimizers and methods.

    python -m bench.experiments.dp_density --problems python-adamw --methods dense int4 --rates 8e-3
    python -m bench.experiments.dp_density --problems clicks-sgd --data ROWS.tsv --rates 0.1

The python-... problems train a transformer on the Python sources of torch and sympy. Each character
is used at most once. The clicks-... problems train DLRM on click rows, which are generated or read
from --data. clicks-adam uses row-wise AdaGrad for the tables (with --table-lr) and Adam for the
MLPs. Learning rates fall to 0 along a cosine. In the python-... problems, learning rates first rise
for --warmup steps.

Methods:

    dense, bf16                         an all-reduce in float32 or bfloat16
    powersgd4, powersgd8, powersgd16    PowerSGD of this rank, after 10 % of the steps
    dct:D%                              DCTState sends D % of the entries by an all-gather
    reduce_scatter:D%                   DCTState sends D % of the entries by a reduce-scatter
    int8, int4, ternary                 DCTState sends all entries in this format
    local:D%xH, local-FORMAT:xH         DCTAverager with period H
    diloco:xH, diloco30:xH, diloco10:xH DiLoCo with period H and outer rate 0.7, 0.3 or 0.1
    dion4, dion8, demo                  Dion at rank 1/4 or 1/8, with AdamW at 0.008 for all other
                                        parameters, or DeMo (dp_peers.py says how to install them)
    ahead:D%                            DCTAverager(period=1, step_ahead=True)
    fsdp-WEIGHTS-GRADIENTS              compress_fully_shard; scored with unrounded weights
    fsdp1-FORMAT, zero2-FORMAT          FSDP1, or DeepSpeed's ZeRO 2, on the process group "dct", or
                                        on gloo for "float32"

dct, int8, int4, ternary, local and ahead also accept the ending ",transport=reduce_scatter".

fsdp1, zero2, dion and demo use a process for each rank. For all other methods, the ranks are
simulated in one process. The results are bitwise equal to the results of real ranks. The bytes that
a rank sends are computed from the message sizes. For fsdp1, they do not include the gathers of
weights. For DeMo, they include positions of 64 bits.

1. With several rates, each method is trained with each rate from seed 0. The best rate of a method
   has the lowest loss on the validation part.
2. Each method is trained at its best rate from seeds 0, 1, 2, ... and scored on the test part.

Each finished run is stored as a file in --out and is not repeated. You can therefore restart an
interrupted command, and add methods, rates and seeds. The report covers all runs in --out.
"""

import argparse
import copy
import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from bench import files
from bench.cli import Parser, announce_backend, count, exit_status, make_folder, positive, several
from dct_embeddings import RowWiseAdagrad

from . import dp_groups, dp_local, dp_methods, dp_python, dp_ranks, dp_shards, dp_tasks, runs

CURVE_EVERY = 20  # steps

Task = dp_tasks.ClicksTask | dp_python.PythonTask


class Problem(NamedTuple):
    """A task and its optimizer.

    Attributes:
        rates: learning rates to try by default.
    """

    task: str
    optimizers: Callable[[nn.Module, float, float], list[torch.optim.Optimizer]]
    rates: tuple[float, ...]


def _one(make: Callable) -> Callable:
    return lambda model, rate, table_rate: [make(model.parameters(), lr=rate)]


def _adam_and_adagrad(model: nn.Module, rate: float, table_rate: float) -> list:
    mlps = [*model.bottom.parameters(), *model.top.parameters()]
    tables = RowWiseAdagrad(model.tables.parameters(), lr=table_rate)
    return [tables, _adam(mlps, lr=rate)]


_sgd = partial(torch.optim.SGD, fused=True)
_adam = partial(torch.optim.Adam, fused=True)
_adamw = partial(torch.optim.AdamW, fused=True)
PROBLEMS = {
    "python-adamw": Problem("python", _one(_adamw), (4e-3, 8e-3, 1.6e-2)),
    "python-momentum": Problem("python", _one(partial(_sgd, momentum=0.9)), (0.1, 0.3)),
    "clicks-sgd": Problem("clicks", _one(_sgd), (0.1, 0.3)),
    "clicks-momentum": Problem("clicks", _one(partial(_sgd, momentum=0.9)), (0.01, 0.03)),
    "clicks-adam": Problem("clicks", _adam_and_adagrad, (1e-3, 3e-3)),
}


def train(run: dict, problem: Problem, task: Task, options: argparse.Namespace) -> dict:
    """Train one run and return its record."""
    start = time.process_time()
    model = task.model(run["seed"])
    batches = [task.batches(run["seed"], rank, options.ranks) for rank in range(options.ranks)]
    make = dp_methods.method(run["method"])
    if make.func is dp_ranks.PowerSGD:
        make = partial(make, start=max(dp_ranks.START_STEP, options.steps // 10))
    warmup = options.warmup if problem.task == "python" else 1
    parts = [
        (1 + math.cos(math.pi * step / options.steps)) / 2 * min(1, (step + 1) / warmup)
        for step in range(options.steps)
    ]

    def update_of(model: nn.Module) -> Callable[[int], None]:
        return stepper(problem.optimizers(model, run["rate"], options.table_lr), parts)

    if dp_methods.is_local(make):
        models = [model, *(copy.deepcopy(model) for _ in batches[1:])]
        updates = [update_of(replica) for replica in models]
        steps = dp_local.train(models, task.loss, batches, make(models), updates, options.steps)
    elif make.func is dp_shards.Shards:
        shards, update = make(model, options.ranks), update_of(model)
        steps = dp_shards.train(model, task.loss, batches, shards, update, options.steps)
    elif make.func is dp_groups.Group:

        def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
            return problem.optimizers(model, run["rate"], options.table_lr)[0]

        made = make(), optimizer_of, lambda optimizer: stepper([optimizer], parts)
        steps = dp_groups.train(model, task.loss, batches, *made, options.steps)
    else:
        update = update_of(model)
        steps = dp_ranks.train(model, task.loss, batches, make, update, options.steps)
    curve: list[list[float]] = []
    for step, (loss, exchange) in enumerate(steps, start=1):
        if not math.isfinite(loss):
            return run | {"diverged": step}
        sent = exchange.sent
        if step % CURVE_EVERY == 0:
            curve.append([step, round(loss, 5)])
    return {
        **run,
        **{part: task.score(model, part) for part in ("validation", "test")},
        "bytes": {"bytes a step": sent / options.steps},
        "curve": curve,
        "cpu_seconds": time.process_time() - start,
    }


def stepper(
    optimizers: list[torch.optim.Optimizer], parts: Sequence[float]
) -> Callable[[int], None]:
    """Return a function that runs the optimizers, with rates multiplied by parts[step]."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    full = [group["lr"] for group in groups]

    def update(step: int) -> None:
        for group, rate in zip(groups, full, strict=True):
            group["lr"] = rate * parts[step]
        for optimizer in optimizers:
            optimizer.step()

    return update


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    names = ("ranks", "table_lr", "batch", "width", "layers", "warmup", "rows")
    return runs.settings_of(options, *names)


def work(options: argparse.Namespace) -> None:
    """Execute all selected runs that have no results yet."""
    runs.load(options.out, settings_of(options))  # raises an error if a stored run differs

    @cache
    def task(name: str) -> Task:
        batch = {} if options.batch is None else {"batch": options.batch}
        if name == "python":
            return dp_python.PythonTask(options.width, options.layers, **batch)
        return dp_tasks.ClicksTask(options.data, options.rows, **batch)

    def finish(run: dict, problem: Problem) -> None:
        path = runs.path(options.out, run)
        if not path.exists():
            record = train(run, problem, task(problem.task), options)
            files.write_json(path, record)
            print(f"{path.stem}: {record.get('validation', 'diverged')}", flush=True)

    for name, method in itertools.product(options.problems, options.methods):
        problem = PROBLEMS[name]
        rates = options.rates or problem.rates
        run = {"problem": f"{name}, {options.steps} steps", "method": method}
        run["settings"] = settings_of(options)
        for rate in rates if len(rates) > 1 else ():
            finish(run | {"rate": rate, "seed": runs.RATE_SEED}, problem)
        rate = rates[0]
        if len(rates) > 1:
            records = runs.load(options.out, run["settings"])
            rate = runs.best_rate(records, run["problem"], method)
        for seed in range(options.seeds) if rate is not None else ():
            finish(run | {"rate": rate, "seed": seed}, problem)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m bench.experiments.dp_density", description=__doc__)
    add = parser.add_argument
    add("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), metavar="P")
    methods = ["dense", "bf16", "dct:1%"]
    add("--methods", nargs="+", type=dp_methods.named, default=methods, metavar="M")
    add("--rates", type=several(positive), help="learning rates (default: depends on the problem)")
    add("--table-lr", type=positive, default=0.02, help="learning rate of clicks-adam's tables")
    add("--steps", type=count, default=600)
    add("--seeds", type=count, default=3)
    add("--ranks", type=count, default=2)
    add("--batch", type=count, metavar="N", help="128 rows or 8 texts per rank and step by default")
    add("--warmup", type=count, default=50, help="warm-up steps (a tenth of --steps in long runs)")
    add("--width", type=count, default=96, help="width of the transformer")
    add("--layers", type=count, default=3, help="layers of the transformer")
    add("--data", type=Path, metavar="FILE", help="click rows in Criteo's layout")
    add("--rows", type=count, default=1_000_000, help="rows to generate without --data")
    add("--out", type=Path, default=Path("runs/dp_density"))
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    announce_backend("cpu")
    make_folder(options.out)
    work(options)
    report = runs.tables(runs.load(options.out, settings_of(options)))
    print(report)
    files.write(options.out / "report.md", report.encode())


if __name__ == "__main__":
    raise SystemExit(exit_status("dp_density", main))
