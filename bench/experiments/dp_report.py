"""Tables and plots of dp_density.py's runs."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib import color_sequences
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dlrm import files
from tables import difference, mean

RATE_SEED = 0  # of the runs that learning rates are chosen by


def load(folder: Path) -> list[dict]:
    """All runs in the folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*_*.json"))]


def best_rate(
    records: Sequence[dict], problem: str, schedule: str, name: str, steps: int
) -> float | None:
    """The only one, or that of the lowest validation loss after as many steps: the mean over the
    seeds that all rates have."""
    setting = (problem, schedule, name, steps)
    runs = [
        record
        for record in records
        if (record["problem"], record["schedule"], record["method"], record["steps"]) == setting
        and "diverged" not in record
    ]
    rates = {record["rate"] for record in runs}
    if len(rates) == 1:
        return rates.pop()
    by_rate: dict[float, dict[int, float]] = {}
    for record in runs:
        by_rate.setdefault(record["rate"], {})[record["seed"]] = record["validation"]["loss"]
    seeds = set.intersection(*map(set, by_rate.values())) if by_rate else ()
    losses = {rate: sum(own[seed] for seed in seeds) for rate, own in by_rate.items()}
    return min(losses, key=losses.get) if seeds else None


def best_runs(records: Sequence[dict]) -> dict[tuple[str, str, int], dict[str, list[dict]]]:
    """{(problem, schedule, steps): {method: its runs at its best rate, by seed}}."""
    found: dict = {}
    for record in sorted(records, key=lambda record: record["seed"]):
        problem, schedule, name = record["problem"], record["schedule"], record["method"]
        rate = best_rate(records, problem, schedule, name, record["steps"])
        if "test" in record and record["rate"] == rate:
            runs = found.setdefault((problem, schedule, record["steps"]), {})
            runs.setdefault(name, []).append(record)
    return found


def tables(records: Sequence[dict]) -> str:
    """Markdown: the test part's scores, mean ± standard deviation over seeds; differences of its
    loss from dense's by seed, mean ± standard error, and the largest."""
    lines = []
    for (problem, schedule, steps), methods in best_runs(records).items():
        dense = next((runs for name, runs in methods.items() if name == "dense"), None)
        scores = next(iter(methods.values()))[0]["test"]
        headings = ["method", *scores, "worst seed's loss", "loss over dense's, by seed", "at most"]
        headings += ["overflow", "bytes a step", "fewer by"]
        headings += ["rate", "rates tried", "seeds", "vNMSE"]
        lines += [f"**{problem}, {schedule}, {steps:,} steps**", ""]
        lines += ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
        for name, runs in sorted(methods.items(), key=lambda item: -item[1][0]["bytes_per_step"]):
            over, most, fewer = "", "", ""
            if dense is not None:
                pairs = paired(runs, dense)
                over, most = difference(pairs), f"{max(pairs, default=math.nan):+.4f}"
                fewer = f"{dense[0]['bytes_per_step'] / runs[0]['bytes_per_step']:.1f}x"
            tried = sorted(
                {
                    record["rate"]
                    for record in records
                    if (record["problem"], record["schedule"], record["method"], record["steps"])
                    == (problem, schedule, name, steps)
                }
            )
            cells = [name, *(mean([run["test"][key] for run in runs]) for key in scores)]
            cells += [f"{max(run['test']['loss'] for run in runs):.4f}", over, most]
            late = [run["overflow"] for run in runs if "overflow" in run]
            cells.append(f"{statistics.mean(late):.1%}" if late else "")
            cells += [f"{runs[0]['bytes_per_step']:,.0f}", fewer, f"{runs[0]['rate']:g}"]
            cells += [", ".join(f"{rate:g}" for rate in tried), str(len(runs)), vnmse(runs)]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def vnmse(runs: Sequence[dict]) -> str:
    """The error of the mean gradient at every step that has it: the mean over seeds."""
    found = [run["vnmse"] for run in runs if "vnmse" in run]
    steps = found[0] if found else ()
    means = {step: statistics.mean(errors[step] for errors in found) for step in steps}
    return ", ".join(f"{mean:.2g} at {step}" for step, mean in means.items())


def paired(runs: Sequence[dict], dense: Sequence[dict]) -> list[float]:
    """Differences of the test loss, seed by seed."""
    by_seed = {run["seed"]: run["test"]["loss"] for run in dense}
    return [r["test"]["loss"] - by_seed[r["seed"]] for r in runs if r["seed"] in by_seed]


def plot(folder: Path, records: Sequence[dict]) -> None:
    """The test loss against steps, and at the end over dense's against bytes: means over seeds."""
    for (problem, schedule, steps), methods in best_runs(records).items():
        figure = Figure(figsize=(13, 5), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        colors = color_sequences["tab20"]
        for number, (name, runs) in enumerate(methods.items()):
            curves = torch.tensor([run["test_curve"] for run in runs]).mean(0)
            late = curves[len(curves) // 3 :]  # the rest is steep
            style = {"color": colors[number % len(colors)], "label": name}
            left.plot(late[:, 0], late[:, 1], linewidth=1, **style)
            pairs = paired(runs, methods.get("dense", []))
            if pairs:
                error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0
                sent = runs[0]["bytes_per_step"]
                right.errorbar([sent], [statistics.mean(pairs)], [error], fmt="o", **style)
        left.set(xlabel="step", ylabel="test loss")
        right.set(xlabel="bytes a rank sends a step", ylabel="test loss over dense", xscale="log")
        for axes in (left, right):
            axes.grid(alpha=0.3)
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize=8)
        seeds = {len(runs) for runs in methods.values()}
        figure.suptitle(f"{problem}, {schedule}, {steps:,} steps; means of {max(seeds)} seeds")
        files.write_figure(folder / f"{problem}-{schedule}-{steps}.png", figure, dpi=110)
