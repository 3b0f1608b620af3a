"""Writes the results of a comparison: summary.json, curves.png and a table."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .loop import Run
from .modes import START_STEP
from .scores import Scores

Runs = dict[str, list[Run]]  # by mode
SUMMARY, CURVES = "summary.json", "curves.png"
SHORT_STEPS = 300  # in shorter runs, modes differ mostly because DCT sends gradients late
LINK = 1e9  # bits per second
SMOOTHED_STEPS = 100  # in short runs, a tenth of the steps


def write_summary(folder: Path, config: dict, data: dict, runs: Runs, bayes: Scores | None) -> None:
    """Write summary.json: {"config", "data", "modes": {mode: [an object per seed]}, "bayes"}.

    "bayes" contains the scores of the true probabilities, which exist only for generated rows.
    """
    summary = {"config": config, "data": data}
    summary["modes"] = {mode: [run.summary() for run in each] for mode, each in runs.items()}
    if bayes is not None:
        summary["bayes"] = bayes._asdict()
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")


def write_curves(folder: Path, runs: Runs) -> None:
    """Write the figure of `plot` to curves.png."""
    plot(runs).savefig(folder / CURVES, dpi=120)


def plot(runs: Runs) -> Figure:
    """Plot the smoothed training loss, averaged over seeds, against the bytes sent so far."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for mode, each in runs.items():
        loss = np.mean([run.record.loss for run in each], axis=0)
        width = min(SMOOTHED_STEPS, 1 + len(loss) // 10)
        smooth = np.convolve(loss, np.ones(width) / width, "valid")
        sent = np.mean([run.record.total for run in each], axis=0).cumsum()[width - 1 :]
        axes.plot(sent, smooth, label=f"{mode} ({len(each)} seed{'s' * (len(each) > 1)})")
    axes.set(
        title=f"DLRM, {len(loss):,} steps: training loss against bytes sent",
        xlabel="bytes sent per rank since the first step",
        ylabel=f"training loss, mean over {width} steps",
        xscale="log" if sent.all() else "linear",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def line(mode: str, run: Run) -> str:
    """Describe a run in one line."""
    scores, sent = run.scores, run.summary()["bytes_per_step_per_rank"]
    return (
        f"{mode} seed {run.seed}: AUC {scores.auc:.4f}, log loss {scores.log_loss:.4f}, "
        f"{sent:,.0f} bytes per step"
    )


def print_table(console: Console, runs: Runs, bayes: Scores | None) -> None:
    """Print a row per mode: scores (mean ± standard deviation), and bytes per rank and step."""
    results = {mode: [run.summary() for run in each] for mode, each in runs.items()}
    purposes = list(next(iter(results.values()))[0]["bytes_by_purpose"])
    table = Table("mode", box=SIMPLE_HEAD, pad_edge=False)
    scores = {"auc": "AUC", "log_loss": "log loss"}
    sizes = [*(purposes if len(purposes) > 1 else []), "bytes/step", "reduction"]
    for heading in (*scores.values(), *sizes):
        table.add_column(heading, justify="right", no_wrap=True)
    for mode, each in results.items():
        sent = mean(runs[mode], "bytes_per_step_per_rank")
        parts = [float(np.mean([one["bytes_by_purpose"][p] for one in each])) for p in purposes]
        dense = mean(runs["dense"], "bytes_per_step_per_rank") if "dense" in runs else 0
        table.add_row(
            mode,
            *(_spread([one[key] for one in each]) for key in scores),
            *(f"{part:,.0f}" for part in parts if len(parts) > 1),
            f"{sent:,.0f}",
            f"{dense / sent:.1f}x" if dense and sent else "-",
        )
    if bayes is not None:
        table.add_row("Bayes", *(f"{getattr(bayes, key):.4f}" for key in scores))
    console.print(table)
    seeds = max(map(len, results.values()))
    notes = [f"±: standard deviation over {seeds} seeds."] if seeds > 1 else []
    notes += ["Bayes: the true probabilities, which no model exceeds on average."] if bayes else []
    notes.append(f"Bytes: per rank and step, without the first {START_STEP} steps.")
    console.print(" ".join(notes), highlight=False)
    steps = min(len(run.record.loss) for each in runs.values() for run in each)
    if steps < SHORT_STEPS:
        console.print(f"{steps:,} steps: too short to judge quality", style="yellow")


def conclusion(runs: Runs) -> str:
    """Compare "dct" with "dense" in a few sentences, if both were run on several ranks."""
    if not {"dense", "dct"} <= runs.keys():
        return ""
    dense, dct = runs["dense"], runs["dct"]
    sent = [mean(each, "bytes_per_step_per_rank") for each in (dense, dct)]
    if not sent[1]:
        return ""
    seconds = [8 * nbytes / LINK for nbytes in sent]
    text = (
        f"DCT sent {sent[0] / sent[1]:.1f} times fewer bytes than float32. Over a 1 Gbit/s link, "
        f"these bytes take {1e3 * seconds[1]:.1f} ms per step instead of {1e3 * seconds[0]:.0f} ms."
    )
    if len(dense[0].record.loss) < SHORT_STEPS:
        return text
    losses = np.array([[run.scores.log_loss for run in each] for each in (dense, dct)])
    change = losses[1].mean() - losses[0].mean()
    if len(dense) == 1:
        return f"Log loss with one seed: {change:+.4f} compared with float32. {text}"
    spread = losses.std(axis=1, ddof=1).max()
    verdict = "Same quality within" if abs(change) <= spread else "The difference exceeds"
    quality = f"{verdict} the spread over seeds (log loss {change:+.4f}, spread {spread:.4f})"
    return f"{quality}. {text}"


def mean(runs: Sequence[Run], key: str) -> float:
    """The mean of an entry of `Run.summary` over runs."""
    return float(np.mean([run.summary()[key] for run in runs]))


def _spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
