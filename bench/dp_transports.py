"""DLRM's quality over ways of averaging gradients, and over densities: one-way and two-way DCT.

    python bench/dp_transports.py --data ROWS.tsv --epochs 5 --batch-size 64 --out runs/dp_kaggle
    python bench/dp_transports.py --rows 400000 --methods dense,all_gather --densities 0.01

dense, bf16 and powersgd are dct-train's modes. topk is an exact top-k of all gradients with error
feedback, all_gather and reduce_scatter are DCT with these transports: each of the three at every
density. All runs of a seed start from the same weights and see the same batches.

Each finished run is a file in --out. A run whose file is there is not repeated, so a command that
was interrupted goes on where it was, and further methods, densities and seeds may be added. In the
end it prints a table of all runs in --out, and writes it there (report.md), with a plot
(quality.png). With --beside NAME=DIR it shows DCT's runs of another version of the code, too.

Other options are those of dct-train.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from run_files import beside, read, settings_of, spread, train, with_error, write_report

from dct_bench.link.methods import METHODS
from dct_dlrm import arguments, loop
from dct_dlrm.argument_types import count, density, several
from dct_dlrm.command_line import Formatter, Parser, exit_status
from dct_dlrm.data import dataset
from dct_dlrm.models.row_exchange import EXCHANGES
from dct_dlrm.modes import MODES

WHOLE = ("dense", "bf16", "powersgd")
TRANSPORTS = ("all_gather", "reduce_scatter")
SPARSE = ("topk", *TRANSPORTS)
# What must be equal in all runs of a folder: everything but what a method or a run is.
SETTINGS = ("rows", "test_fraction", "epochs", "batch_size", "lr", "embedding_lr", "hash_size")
SETTINGS += ("embedding_dim", "bottom", "top", "refresh_every", "bucket_mb")
SETTINGS += ("parallel", "mp_format", "dedup")


class Run(NamedTuple):
    """One training; density is None for a method that sends no fraction of the entries."""

    method: str
    density: float | None
    seed: int

    @property
    def title(self) -> str:
        return self.method if self.density is None else f"{self.method} {100 * self.density:g} %"

    def path(self, folder: Path) -> Path:
        at = "" if self.density is None else f"_density{self.density:g}"
        return folder / f"{self.method}{at}_seed{self.seed}.json"


def all_runs(methods: Sequence[str], densities: Sequence[float], seeds: Sequence[int]) -> list[Run]:
    """Seed by seed, so that what is there early can be compared."""
    return [
        Run(method, of_method, seed)
        for seed, method in itertools.product(seeds, methods)
        for of_method in (densities if method in SPARSE else (None,))
    ]


def job(
    run: Run, data: dataset.Dataset, options: argparse.Namespace, on_step: Callable
) -> tuple[dict, str]:
    """Of `run_files`: one run, scored on the test rows."""
    MODES["topk"] = METHODS["topk"].register
    EXCHANGES["topk"] = EXCHANGES["dct"]
    mode = run.method
    if mode in TRANSPORTS:
        mode, options.transport = "dct", run.method
    options.density = run.density or 1.0
    result = loop.run(mode, run.seed, data, options, on_step)
    found = {"summary": result.summary()}
    if dist.get_rank() != 0:  # where there are no scores
        return found, ""
    return found, f"AUC {result.auc:.4f}, log loss {result.log_loss:.4f}"


def report(records: Sequence[dict]) -> str:
    """Markdown: bytes; scores, mean ± standard deviation over seeds; differences of the log loss
    from dense's by seed, mean ± standard error, and the largest."""
    headings = ["method", "bytes a step", "fewer than dense", "seeds", "AUC", "log loss", "worst"]
    headings += ["calibration", "log loss over dense's, by seed", "at most"]
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    groups = by_method(records)
    dense = {r["seed"]: r["summary"]["log_loss"] for r in groups.get(("dense", None), [])}
    most = sent(groups[("dense", None)]) if dense else None
    for (method, of_density), runs in groups.items():
        losses = {run["seed"]: run["summary"]["log_loss"] for run in runs}
        over = [loss - dense[seed] for seed, loss in losses.items() if seed in dense]
        cells = [
            Run(method, of_density, 0).title,
            f"{sent(runs):,.0f}",
            f"{most / sent(runs):.1f}x" if most else "-",
            str(len(runs)),
            spread([run["summary"]["auc"] for run in runs]),
            spread(list(losses.values())),
            f"{max(losses.values()):.4f}",
            # Which runs of earlier versions lack.
            spread([r["summary"]["calibration"] for r in runs if "calibration" in r["summary"]]),
            "" if method == "dense" else with_error(over),
            "" if method == "dense" or not over else f"{max(over):+.4f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def by_method(records: Sequence[dict]) -> dict[tuple[str, float | None], list[dict]]:
    """{(method, density): its runs by seed}, in the order of the table: high densities first."""

    def order(record: dict) -> tuple:
        place = (*WHOLE, *SPARSE).index(record["method"].partition(" ")[0])
        return place, record["method"], -(record["density"] or 0.0), record["seed"]

    groups: dict[tuple[str, float | None], list[dict]] = {}
    for record in sorted((r for r in records if "diverged" not in r), key=order):
        groups.setdefault((record["method"], record["density"]), []).append(record)
    return groups


def sent(runs: Sequence[dict]) -> float:
    """Bytes of the rank that sends most in a step."""
    return max(run["summary"]["wire_bytes_per_step_max_rank"] for run in runs)


def plot(path: Path, records: Sequence[dict]) -> None:
    """AUC over density, a line for each sparse method and one across for each other one."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    groups = by_method(records)
    for method in dict.fromkeys(name for name, _ in groups):
        points = [
            (of_density, [run["summary"]["auc"] for run in runs])
            for (name, of_density), runs in groups.items()
            if name == method
        ]
        means = [sum(scores) / len(scores) for _, scores in points]
        if method in WHOLE and points:
            axes.axhline(means[0], linestyle=":", label=method, color=f"C{WHOLE.index(method)}")
        elif points:
            x = [100 * of_density for of_density, _ in points]
            low = [mean - min(scores) for mean, (_, scores) in zip(means, points, strict=True)]
            high = [max(scores) - mean for mean, (_, scores) in zip(means, points, strict=True)]
            axes.errorbar(x, means, (low, high), marker="o", capsize=3, label=method)
    axes.set(xscale="log", xlabel="density, %", ylabel="AUC, mean and range of seeds")
    axes.legend()
    FigureCanvasAgg(figure).print_png(path)


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, argparse.Namespace]:
    """(dct-train's options, this command's)."""
    parser = Parser(prog="dp_transports.py", description=__doc__, formatter_class=Formatter)
    methods = (*WHOLE, *SPARSE)
    parser.add_argument("--methods", type=several(str, methods), default=",".join(methods))
    parser.add_argument("--densities", type=several(density), default="0.01,0.005,0.001")
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/dp_transports"), metavar="DIR")
    parser.add_argument("--beside", nargs="*", type=beside, default=[], metavar="NAME=DIR")
    args, rest = parser.parse_known_args(argv)
    return arguments.parse([*rest, "--out", str(args.out)]), args


def main() -> int:
    return exit_status("dp_transports.py", _main)


def _main() -> None:
    options, args = parse()
    settings = settings_of(options, SETTINGS)
    options.out.mkdir(parents=True, exist_ok=True)
    read(options.out, settings)
    train(options, all_runs(args.methods, args.densities, range(args.seeds)), settings, job)
    records = read(options.out, settings)
    for name, folder in args.beside:
        others = [record for record in read(folder, settings) if record["method"] in TRANSPORTS]
        records += [record | {"method": f"{record['method']} {name}"} for record in others]
    plot(options.out / "quality.png", records)
    write_report(options.out, report(records), "quality.png, ")


if __name__ == "__main__":
    raise SystemExit(main())
