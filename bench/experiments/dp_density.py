"""Where the density of DCT matters: losses of data-parallel training, by optimizer and method.

    python -m experiments.dp_density --problems text-adamw --methods dense dct:1% --rates 1e-3,4e-3
    python -m experiments.dp_density --problems clicks-sgd --steps 3000 --methods dense bf16 dct:1%
    python -m experiments.dp_density --problems clicks-sgd --data ROWS.tsv --rates 0.1

Problems: text-... train a transformer (--width 96, --layers 3, 8 x 64 characters a rank) on the
characters of --text, which is generated if it is not there; a short text, read many times over, is
overfitted, and noise then helps. text-muon and python-muon have Muon on the matrices of the layers
and AdamW on the rest. clicks-sgd, clicks-momentum and clicks-adam train DLRM on rows of clicks (128
a rank), generated or --data: with SGD, with its momentum, or with row-wise AdaGrad on its tables
and Adam on its MLPs, where the rate is Adam's, and the tables' is --table-lr; tables-adam, with
Adam on all. python-adamw trains the transformer on the sources of torch and sympy, of which no
character is read twice; finetune-adamw goes on with sympy's from one that was trained on torch's.
mlp-adam trains a deep MLP that needs its biases (128 rows a rank).

Schedules: the rate of transformers and of the MLP rises over the first 50 steps (--warmup). Then it
falls to 0 along a cosine; stays and falls to 0, linearly, over the last fifth of the steps (wsd);
or is constant.

Methods: dense (float32), bf16, powersgd (rank 1), topk:D% (exact, with error feedback) and dct:D%,
D being the percentage of entries sent, which all ranks gather; reduce_scatter:D%: a rank owns a
range of the gradient, and compresses its mean once more. Entries are sent in bfloat16;
dct-float32:D%: in float32; int8, int4 and ternary: every entry in so few bits;
blocks-int4,width=W and the like: with a scale for every W entries; blocks-e2m1: with one for every
16 and one for every 1,024. Blocks take exact=vectors: biases and norms go in bfloat16.

local:D%xH: every rank takes H steps of its own optimizer, then D % of what its weights have moved
by are sent, with error feedback: D / H a step; local-int4:100%xH and the like with every entry in
few bits, local-blocks-int4:xH,width=W in blocks. They take settings after commas: decay=B (of the
residual); spaced=rate, root or rate2 (as many exchanges, further apart where the rate is lower: by
it, its root or its square), first=N (so many of them at the first steps, the others further apart);
outer=R and momentum=B (an outer optimizer, SGD with Nesterov's momentum); moments=first, second or
both (of Adam, averaged as well, in float32); and pull=K (first moments are corrected by what the
exchange tells).
They, and those of gradients, also take transport=reduce_scatter. Beside them: postlocal:xH, float32
weights averaged; diloco:xH, with its outer optimizer; sparseloco:D%xH, with its top-k, 2-bit values
and decay; accordion:D%,critical=C: C % are sent in critical regimes, which are looked for after
every window=N steps; accordion-ternary: int4 and ternary; ahead:D% and ahead-ternary: SAEF, whose
residuals are averaged after share=N exchanges, with every=H steps from one to the next.

The ranks are simulated in one process, bit for bit as real ones; bytes are what a rank sends, by
formula.

1. With several rates every method is trained with each, from seed 0. Its best rate is that of the
   lowest loss on the validation part after as many steps; of more seeds, if all rates have them:
   where two rates are close, give each alone with --seeds 3.
2. At its best rate it is trained from seeds 0, 1, 2, ... and scored on the test part.

With --validation-only the test part is left alone, as it should be where methods are chosen among;
whoever asks for its scores later trains these runs again.

Each finished run is a file in --out, and is not repeated: a command that was interrupted goes on
where it was, and methods, rates and seeds may be added. In the end it prints a report on all runs
in --out, and writes it there: report.md, and plots of the test loss against steps, and of how far
it ends over dense's against bytes.
"""

import argparse
import copy
import itertools
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from dct_embeddings import RowWiseAdagrad
from dlrm import files
from dlrm.argument_types import count, positive, several
from dlrm.command_line import Formatter, Parser, exit_status, make_folder

from . import dp_local, dp_methods, dp_python, dp_ranks, dp_report, dp_tasks
from .dp_report import RATE_SEED

WARMUP_STEPS = 50  # of a transformer's rate, and the MLP's
CURVE_EVERY = 20  # steps
TEST_POINTS = 20  # of a run's curve of the test loss


class Problem(NamedTuple):
    """A task and its optimizer."""

    task: str
    optimizers: Callable[[nn.Module, float, float], list[torch.optim.Optimizer]]
    warmup: int
    rates: tuple[float, ...]  # tried, unless others are asked for

    def rate_at(self, schedule: str, step: int, steps: int) -> float:
        """The part of the full rate that step number `step` of so many is taken with."""
        return SCHEDULES[schedule](step / steps) * min(1, (step + 1) / max(1, self.warmup))


# Of the part of the steps that is behind: the part of the full rate.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
    "wsd": lambda part: min(1, 5 * (1 - part)),
    "constant": lambda part: 1,
}


def _one(make: Callable) -> Callable:
    return lambda model, rate, table_rate: [make(model.parameters(), lr=rate)]


def _adam_and_adagrad(model: nn.Module, rate: float, table_rate: float) -> list:
    mlps = [*model.bottom.parameters(), *model.top.parameters()]
    tables = RowWiseAdagrad(model.tables.parameters(), lr=table_rate)
    return [tables, _adam(mlps, lr=rate)]


def _muon_and_adamw(model: nn.Module, rate: float, table_rate: float) -> list:
    hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
    muon = torch.optim.Muon(hidden, lr=rate, adjust_lr_fn="match_rms_adamw")
    return [muon, _adamw(others, lr=rate)]


_sgd = partial(torch.optim.SGD, fused=True)
_adam = partial(torch.optim.Adam, fused=True)
_adamw = partial(torch.optim.AdamW, fused=True)
PROBLEMS = {
    "text-adamw": Problem("text", _one(_adamw), WARMUP_STEPS, (4e-3, 8e-3, 1.6e-2)),
    "text-muon": Problem("text", _muon_and_adamw, WARMUP_STEPS, (4e-3, 8e-3, 1.6e-2)),
    "text-sgd": Problem("text", _one(_sgd), WARMUP_STEPS, (0.5, 1.0)),
    "text-momentum": Problem("text", _one(partial(_sgd, momentum=0.9)), WARMUP_STEPS, (0.1, 0.3)),
    "clicks-sgd": Problem("clicks", _one(_sgd), 0, (0.1, 0.3)),
    "clicks-momentum": Problem("clicks", _one(partial(_sgd, momentum=0.9)), 0, (0.01, 0.03)),
    "clicks-adam": Problem("clicks", _adam_and_adagrad, 0, (1e-3, 3e-3)),
    "tables-adam": Problem("clicks", _one(_adam), 0, (1e-3, 2e-3)),
    "mlp-adam": Problem("mlp", _one(_adam), WARMUP_STEPS, (1e-3, 2e-3)),
    "python-adamw": Problem("python", _one(_adamw), WARMUP_STEPS, (4e-3, 8e-3, 1.6e-2)),
    "python-muon": Problem("python", _muon_and_adamw, WARMUP_STEPS, (4e-3, 8e-3, 1.6e-2)),
    "finetune-adamw": Problem("finetune", _one(_adamw), WARMUP_STEPS, (1e-3, 2e-3)),
}


class Run(NamedTuple):
    problem: str
    schedule: str
    method: str
    rate: float
    seed: int
    steps: int

    def path(self, folder: Path) -> Path:
        name = re.sub("[:,=]", "-", self.method).replace("%", "percent")
        rate = f"lr{self.rate:g}_seed{self.seed}_{self.steps}steps"
        return folder / f"{self.problem}_{self.schedule}_{name}_{rate}.json"


def train(run: Run, task: dp_tasks.Task, options: argparse.Namespace) -> dict:
    """The record of one run."""
    start = time.process_time()
    model = task.model(run.seed)
    batches = [task.batches(run.seed, rank, options.ranks) for rank in range(options.ranks)]
    make = dp_methods.method(run.method)
    problem = PROBLEMS[run.problem]
    if options.warmup is not None:
        problem = problem._replace(warmup=options.warmup)
    rate_at = partial(problem.rate_at, run.schedule, steps=run.steps)
    if dp_methods.is_local(make):
        models = [model, *(copy.deepcopy(model) for _ in batches[1:])]
        optimizers = [optimizers_of(own, run, options) for own in models]
        updates = [stepper(own, rate_at) for own in optimizers]
        when = {key: make.keywords.pop(key) for key in dp_methods.WHEN if key in make.keywords}
        averaging = make(models)
        averaging.optimizers = [own[0] for own in optimizers]
        if when:
            rates = [rate_at(step) for step in range(run.steps)]
            averaging.due = dp_local.schedule(rates, averaging.period, **when)
        steps = dp_local.train(models, task.loss, batches, averaging, updates, run.steps)
    else:
        update = stepper(optimizers_of(model, run, options), rate_at)
        steps = dp_ranks.train(model, task.loss, batches, make, update, run.steps)
    curve, recent, tested = [], [], []
    record = run._asdict() | {"ranks": options.ranks, "data": task.description}
    record |= {"curve": curve, "test_curve": tested}
    record |= {
        name: getattr(options, name)
        for name in ("batch", "warmup")
        if getattr(options, name) is not None
    }
    if run.problem == "clicks-adam":
        record["table_lr"] = options.table_lr
    for step, (loss, counts) in enumerate(steps, start=1):
        if not math.isfinite(loss):
            return record | {"diverged": step}
        recent.append(loss)
        if step % CURVE_EVERY == 0:
            curve.append([step, counts.sent, round(statistics.mean(recent), 5)])
            recent.clear()
        if step * TEST_POINTS % run.steps < TEST_POINTS:
            tested.append([step, task.score(model, task.curve)["loss"]])
    record |= {part: task.score(model, part) for part in parts(options)}
    if counts.errors:
        record["vnmse"] = counts.errors
    if counts.payloads:
        record["overflow"] = counts.overflowed / counts.payloads
    record |= {
        "bytes_per_step": counts.sent / run.steps,
        "cpu_seconds": time.process_time() - start,
    }
    return record


def parts(options: argparse.Namespace) -> tuple[str, ...]:
    """That a run's model is scored on in the end."""
    return ("validation",) if options.validation_only else ("validation", "test")


def optimizers_of(
    model: nn.Module, run: Run, options: argparse.Namespace
) -> list[torch.optim.Optimizer]:
    return PROBLEMS[run.problem].optimizers(model, run.rate, options.table_lr)


def stepper(
    optimizers: list[torch.optim.Optimizer], rate_at: Callable[[int], float]
) -> Callable[[int], None]:
    """A function of the step's number that takes a step of the weights by their gradients."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    full = [group["lr"] for group in groups]

    def update(step: int) -> None:
        for group, rate in zip(groups, full, strict=True):
            group["lr"] = rate * rate_at(step)
        for optimizer in optimizers:
            optimizer.step()

    return update


def work(options: argparse.Namespace) -> None:
    """All runs that are asked for and not there yet."""

    @cache
    def task(name: str) -> dp_tasks.Task:
        batch = {} if options.batch is None else {"batch": options.batch}
        if name == "text":
            return dp_tasks.TextTask(options.text, options.width, options.layers, **batch)
        if name == "python":
            return dp_python.PythonTask(options.width, options.layers, **batch)
        if name == "finetune":
            start = options.out / "start.pt"
            return dp_python.FineTuneTask(start, options.width, options.layers, **batch)
        if name == "mlp":
            return dp_tasks.BiasesTask(**batch)
        return dp_tasks.ClicksTask(options.data, options.rows, **batch)

    def finish(run: Run, needed: Sequence[str]) -> None:
        path = run.path(options.out)
        if path.exists():
            known = json.loads(path.read_text()).keys()
            if known >= {*needed} or "diverged" in known:
                return
        record = train(run, task(PROBLEMS[run.problem].task), options)
        files.write_json(path, record)
        said = record.get("validation") or f"diverged in step {record['diverged']}"
        print(f"{path.stem}: {said}", flush=True)

    for problem, name in itertools.product(options.problems, options.methods):
        rates = options.rates or PROBLEMS[problem].rates
        for rate in rates if len(rates) > 1 else ():
            run = Run(problem, options.schedule, name, rate, RATE_SEED, options.steps)
            finish(run, ["validation"])
    for seed, problem, name in itertools.product(
        range(options.seeds), options.problems, options.methods
    ):
        rates = options.rates or PROBLEMS[problem].rates
        rate = rates[0]
        if len(rates) > 1:
            rate = dp_report.best_rate(
                dp_report.load(options.out), problem, options.schedule, name, options.steps
            )
        if rate is not None:
            run = Run(problem, options.schedule, name, rate, seed, options.steps)
            finish(run, parts(options))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=Formatter)
    add = parser.add_argument
    add("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), metavar="P")
    add(
        "--methods",
        nargs="+",
        type=dp_methods.named,
        default=["dense", "bf16", "dct:1%"],
        metavar="M",
    )
    add("--rates", type=several(positive), help="to try, joined by ','; each problem has its own")
    add("--schedule", choices=SCHEDULES, default="cosine")
    add("--warmup", type=count, metavar="N", help="steps that the rate rises over; its own --out")
    add("--table-lr", type=positive, default=0.02, help="of clicks-adam's tables")
    add("--steps", type=count, default=600)
    add("--seeds", type=count, default=3)
    add("--ranks", type=count, default=2, help="other numbers need their own --out")
    add("--validation-only", action="store_true", help="do not score the test part")
    add("--batch", type=count, metavar="N", help="rows or texts of a rank and step: 128, or 8")
    add("--width", type=count, default=96, help="of the transformer; needs its own --out")
    add("--layers", type=count, default=3, help="of the transformer; needs its own --out")
    add("--text", type=Path, default=Path("runs/text.txt"), help="generated if it is not there")
    add("--data", type=Path, metavar="FILE", help="rows of clicks in Criteo's layout")
    add("--rows", type=count, default=1_000_000, help="of clicks to generate without --data")
    add("--out", type=Path, default=Path("runs/dp_density"))
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    make_folder(options.out)
    work(options)
    records = dp_report.load(options.out)
    report = dp_report.tables(records)
    print(report, flush=True)
    files.write(options.out / "report.md", report.encode())
    dp_report.plot(options.out, records)


if __name__ == "__main__":
    raise SystemExit(exit_status("dp_density", main))
