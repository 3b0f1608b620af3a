"""Hybrid DLRM over number formats of its rows, with and without distinct rows once.

    python bench/mp_formats.py --data ROWS.tsv --epochs 5 --batch-size 64 --out runs/kaggle
    python bench/mp_formats.py --exchanges float32 int4,sign+dedup --rates 3,10 --seeds 2

An exchange is FORMAT, or FORWARD,BACKWARD, or the percentage of a row's entries that DCT-MP sends,
such as 7.5%; with +dedup each distinct row crosses once. Only rows and their gradients cross so:
the MLPs' gradients are averaged in float32. All runs of a seed start from the same weights and see
the same batches.

1. Every exchange is trained with every rate of the tables, from seed 0. Its best rate is that of
   the lowest log loss on the validation rows. The test rows are not read.
2. At its best rate it is trained from seeds 1, 2, ... and scored on the test rows, once.

Each finished run is a file in --out. A run whose file is there is not repeated, so a command that
was interrupted goes on where it was, and further exchanges, rates and seeds may be added. In the
end it prints a report on all runs in --out, and writes it there (report.md).

Other options are those of dct-train; without --validation-fraction it is 0.1.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console

from dct_dlrm import arguments, loop, progress
from dct_dlrm.argument_types import positive, several
from dct_dlrm.command_line import Formatter, Parser, exit_status
from dct_dlrm.data import dataset
from dct_dlrm.errors import UsageError, WorkerError
from dct_dlrm.launch import launch
from dct_dlrm.models.row_exchange import EXCHANGES, Exchange, largest_entries, whole_rows
from dct_dlrm.modes import MODES
from dct_parallel.rows.codecs import ROW_FORMATS, Codec, make_codec

FORMATS = ("mxfp4", "int8", "int4,int4", "int4,ternary", "int4,sign", "7.5%")
NAMES = [f"{format}{dedup}" for dedup in ("", "+dedup") for format in ("float32", *FORMATS)]
RATE_SEED = 0
# What must be equal in all runs of a folder: everything but what an exchange or a run is.
SETTINGS = ("rows", "test_fraction", "validation_fraction", "epochs", "batch_size", "lr")
SETTINGS += ("hash_size", "embedding_dim", "bottom", "top")


class Kind(NamedTuple):
    """What an exchange's name says."""

    forward: str | None
    backward: str | None
    density: float | None
    dedup: bool

    @staticmethod
    def parse(name: str) -> "Kind":
        formats, plus, word = name.partition("+")
        if (plus, word) not in (("", ""), ("+", "dedup")):
            raise argparse.ArgumentTypeError(f"must end in +dedup or without +, got {name!r}")
        if formats.endswith("%"):
            try:
                density = float(formats[:-1]) / 100
            except ValueError:
                density = 0.0
            if not 0 < density <= 1:
                raise argparse.ArgumentTypeError(f"must be above 0% and up to 100%, got {name!r}")
            return Kind(None, None, density, bool(plus))
        forward, comma, backward = formats.partition(",")
        backward = backward if comma else forward
        if not {forward, backward} <= set(ROW_FORMATS):
            rule = f"one or two of {', '.join(ROW_FORMATS)}, or a percentage"
            raise argparse.ArgumentTypeError(f"must be {rule}, got {name!r}")
        return Kind(forward, backward, None, bool(plus))

    def exchange(self) -> Exchange:
        if self.density is not None:
            return largest_entries(self.density)
        return whole_rows(self.forward, self.backward)

    def codec(self, width: int) -> Codec:
        """Which knows the bytes of a row and of its gradient."""
        value_dtype = None if self.density is None else torch.bfloat16  # as largest_entries has it
        return make_codec("mp_formats", width, self.density, value_dtype, *self[:2])


class Run(NamedTuple):
    exchange: str
    rate: float
    seed: int

    def path(self, folder: Path) -> Path:
        name = self.exchange.replace(",", "-").replace("/", "-").replace("%", "percent")
        return folder / f"{name}_lr{self.rate:g}_seed{self.seed}.json"


def work(options: argparse.Namespace, runs: Sequence[Run], settings: dict) -> None:
    """All of `runs`, on one rank; the first writes a file for each."""
    console = Console() if dist.get_rank() == 0 else None
    data = dataset.load(options)
    steps = options.epochs * data.description["steps_per_epoch"]
    for number, run in enumerate(runs, start=1):
        kind = Kind.parse(run.exchange)
        EXCHANGES[run.exchange] = lambda options, kind=kind: kind.exchange()
        MODES[run.exchange] = MODES["dense"]
        options.dedup, options.embedding_lr = kind.dedup, run.rate
        title = f"{number} of {len(runs)}: {run.exchange}, lr {run.rate:g}, seed {run.seed}"
        start = time.time()
        with progress.bar(console, title, steps) as on_step:
            model, result = loop.train(run.exchange, run.seed, data, options, on_step)
        parts = {"validation": data.validation}
        if run.seed != RATE_SEED:
            parts["test"] = data.test
        scores = {name: loop.test(model, rows, data.train) for name, rows in parts.items()}
        model.close()
        if console is None:
            continue
        record = run._asdict() | {"settings": settings, "data": data.description}
        record["data"] = {key: value for key, value in record["data"].items() if key != "file"}
        record |= {name: {"auc": auc, "log_loss": loss} for name, (auc, loss) in scores.items()}
        summary = result.summary()
        record |= {key: value for key, value in summary.items() if key.endswith("_per_rank")}
        record |= {"step_ms_median": summary["step_ms_median"], "seconds": time.time() - start}
        write(run.path(options.out), record)
        said = [
            f"{name} AUC {auc:.4f}, log loss {loss:.4f}" for name, (auc, loss) in scores.items()
        ]
        console.print(f"{title}: {'; '.join(said)}", highlight=False)


def write(path: Path, record: dict) -> None:
    aside = path.with_suffix(".part")  # an interrupt leaves no half of a file
    aside.write_text(json.dumps(record, indent=1) + "\n")
    aside.replace(path)


def train(
    options: argparse.Namespace,
    runs: Sequence[Run],
    settings: dict,
    work: Callable[[argparse.Namespace, Sequence[Run], dict], None] = work,
) -> None:
    """Those of `runs` that have no file yet."""
    while missing := [run for run in runs if not run.path(options.out).exists()]:
        try:
            launch(work, options.ranks, options, missing, settings)
        except WorkerError as error:
            if "loss stays finite" not in str(error):
                raise
            run = next(run for run in missing if not run.path(options.out).exists())
            print(error)
            write(run.path(options.out), run._asdict() | {"settings": settings, "diverged": True})


def read(folder: Path, settings: dict) -> list[dict]:
    """The runs that are finished.

    Raises:
        UsageError: some have other settings.
    """
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*_seed*.json"))]
    for record in records:
        for key, value in settings.items():
            if record["settings"][key] != value:
                raise UsageError(
                    f"--out must hold runs of one setting, got {key} {record['settings'][key]} in "
                    f"{folder}, {value} asked for"
                )
    return records


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


def report(records: Sequence[dict]) -> str:
    """Markdown: bytes by what they are for, scores over seeds, differences seed by seed."""
    rates = best_rates(records)
    of_exchange = {name: _at(records, name, rate) for name, rate in rates.items()}
    order = [*NAMES, *sorted(of_exchange.keys() - set(NAMES))]
    grid = sorted({record["rate"] for record in records})
    dense = of_exchange.get("float32", [])
    whole = rows_bytes(dense[0]) if dense else None
    distinct = distinct_bytes(records)
    lines = [
        "| rows | ids and counts | forward | backward | fewer than float32 | than float32, dedup | "
        "tables' lr | seeds | AUC | log loss | AUC against float32, by seed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in (name for name in order if name in of_exchange):
        runs = of_exchange[name]
        tested = [run for run in runs if "test" in run]
        sent = rows_bytes(runs[0])
        edge = "" if grid[0] < rates[name] < grid[-1] else " (edge)"
        cells = [
            name,
            f"{_sent(runs[0], 'ids') + _sent(runs[0], 'counts'):,.0f}",
            f"{_sent(runs[0], 'mp_forward'):,.0f}",
            f"{_sent(runs[0], 'mp_backward'):,.0f}",
            f"{whole / sent:.1f}x" if whole else "-",
            f"{distinct / sent:.1f}x" if distinct else "-",
            f"{rates[name]:g}{edge}",
            str(len(tested)),
            spread([run["test"]["auc"] for run in tested]),
            spread([run["test"]["log_loss"] for run in tested]),
            "" if name == "float32" else spread(differences(tested, dense), "+"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"Rates tried, seed {RATE_SEED}, validation rows' log loss (AUC):", ""]
    lines += ["| rows | " + " | ".join(f"{rate:g}" for rate in grid) + " |"]
    lines += ["|---|" + "---|" * len(grid)]
    for name in (name for name in order if name in of_exchange):
        cells = [_validation(records, Run(name, rate, RATE_SEED)) for rate in grid]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rows_bytes(record: dict) -> float:
    """Bytes of rows a rank sends in a step, forward and backward."""
    return _sent(record, "mp_forward") + _sent(record, "mp_backward")


def distinct_bytes(records: Sequence[dict]) -> float | None:
    """Bytes that the distinct rows have in float32, both ways; None where no run had them."""
    for record in records:
        kind = Kind.parse(record["exchange"])
        if kind.dedup and "diverged" not in record:
            width = record["settings"]["embedding_dim"]
            rows = _sent(record, "mp_forward") / kind.codec(width).message_bytes
            return rows * 8 * width
    return None


def differences(runs: Sequence[dict], others: Sequence[dict]) -> list[float]:
    """AUC of `runs` less that of `others`, seed by seed."""
    scores = {run["seed"]: run["test"]["auc"] for run in others if "test" in run}
    return [run["test"]["auc"] - scores[run["seed"]] for run in runs if run["seed"] in scores]


def spread(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.4f}{deviation}"


def _at(records: Sequence[dict], name: str, rate: float) -> list[dict]:
    found = [run for run in records if (run["exchange"], run["rate"]) == (name, rate)]
    return sorted((run for run in found if "diverged" not in run), key=lambda run: run["seed"])


def _sent(record: dict, purpose: str) -> float:
    return record[f"{purpose}_bytes_per_step_per_rank"]


def _validation(records: Sequence[dict], run: Run) -> str:
    for record in records:
        if (record["exchange"], record["rate"], record["seed"]) == run:
            if "diverged" in record:
                return "diverged"
            return f"{record['validation']['log_loss']:.4f} ({record['validation']['auc']:.4f})"
    return ""


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, argparse.Namespace]:
    """(dct-train's options, this command's)."""
    parser = Parser(prog="mp_formats.py", description=__doc__, formatter_class=Formatter)
    parser.add_argument(
        "--exchanges", nargs="+", type=exchange_name, default=NAMES, metavar="EXCHANGE"
    )
    parser.add_argument(
        "--rates", type=several(positive), default=[0.3, 1.0, 3.0, 10.0], help="of the tables"
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="at the best rate; 0: rates only, no test row is read"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/mp_formats"), metavar="DIR")
    args, rest = parser.parse_known_args(argv)
    fixed = ["--parallel", "hybrid", "--out", str(args.out)]
    return arguments.parse(["--validation-fraction", "0.1", *rest, *fixed]), args


def exchange_name(text: str) -> str:
    """An argparse type: the name of an exchange, checked."""
    Kind.parse(text)
    return text


def main() -> int:
    return exit_status("mp_formats.py", _main)


def _main() -> None:
    options, args = parse()
    if not options.validation_fraction:
        raise UsageError("--validation-fraction must be above 0: rates are chosen on those rows")
    settings = {key: getattr(options, key) for key in SETTINGS} | {"ranks": options.ranks}
    settings["data"] = None if options.data is None else options.data.name
    options.out.mkdir(parents=True, exist_ok=True)
    read(options.out, settings)
    first = itertools.product(args.exchanges, args.rates, [RATE_SEED])
    train(options, [Run(*run) for run in first], settings)
    rates = best_rates(read(options.out, settings))
    seeds = range(RATE_SEED + 1, RATE_SEED + 1 + args.seeds)
    second = itertools.product(seeds, [name for name in args.exchanges if name in rates])
    train(options, [Run(name, rates[name], seed) for seed, name in second], settings)
    text = report(read(options.out, settings))
    (options.out / "report.md").write_text(text + "\n")
    print(f"\n{text}\n\nin {options.out}: report.md, a file for each run")


if __name__ == "__main__":
    raise SystemExit(main())
