"""Results of a comparison: summary.json, curves.png and a table."""

import json
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .loop import Run
from .scores import Scores

Runs = dict[str, list[Run]]  # by mode
SUMMARY, CURVES = "summary.json", "curves.png"
SHORT_STEPS = 300  # in shorter runs, modes differ mostly because DCT sends gradients late
SMOOTHED_STEPS = 100  # at most; a tenth of a short run


def write_summary(folder: Path, config: dict, data: dict, runs: Runs, bayes: Scores | None) -> None:
    """summary.json: {"config", "data", "modes": {mode: [one object per seed]}, "bayes"}.

    "bayes" is the score of the true probabilities, for generated rows only.
    """
    summary = {"config": config, "data": data}
    summary["modes"] = {mode: [run.summary() for run in each] for mode, each in runs.items()}
    if bayes is not None:
        summary["bayes"] = bayes._asdict()
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")


def write_curves(folder: Path, runs: Runs) -> None:
    """curves.png: smoothed training loss over steps and over bytes; the mean over seeds."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for mode, each in runs.items():
        loss = np.mean([run.record.loss for run in each], axis=0)
        width = min(SMOOTHED_STEPS, 1 + len(loss) // 10)
        smooth = np.convolve(loss, np.ones(width) / width, "valid")
        sent = np.mean([run.record.total for run in each], axis=0).cumsum()[width - 1 :]
        axes[0].plot(np.arange(width, len(loss) + 1), smooth, label=mode)
        axes[1].plot(sent, smooth, label=mode)
    axes[0].set(xlabel="step", ylabel="training loss")
    axes[1].set(xlabel="bytes sent per rank", xscale="log" if sent.all() else "linear")
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(folder / CURVES, dpi=120)


def line(mode: str, run: Run) -> str:
    """One run in one line."""
    result = run.summary()
    return (
        f"{mode} seed {run.seed}: AUC {result['auc']:.4f}, log loss {result['log_loss']:.4f}, "
        f"{result['bytes_per_step_per_rank']:,.0f} bytes and {result['step_ms_median']:.1f} ms "
        "per step"
    )


def print_table(console: Console, runs: Runs, bayes: Scores | None) -> None:
    """Modes in rows: scores, mean and standard deviation over seeds; bytes per rank and step."""
    results = {mode: [run.summary() for run in each] for mode, each in runs.items()}
    purposes = list(next(iter(results.values()))[0]["bytes_by_purpose"])
    table = Table("mode", box=SIMPLE_HEAD, pad_edge=False)
    scores = {"auc": "AUC", "log_loss": "log loss"}
    sizes = [*(purposes if len(purposes) > 1 else []), "bytes/step", "fewer by"]
    for heading in (*scores.values(), *sizes, "ms/step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for mode, each in results.items():
        sent = _mean(each, "bytes_per_step_per_rank")
        parts = [float(np.mean([one["bytes_by_purpose"][p] for one in each])) for p in purposes]
        dense = _mean(results["dense"], "bytes_per_step_per_rank") if "dense" in results else 0
        table.add_row(
            mode,
            *(_spread([one[key] for one in each]) for key in scores),
            *(f"{part:,.0f}" for part in parts if len(parts) > 1),
            f"{sent:,.0f}",
            f"{dense / sent:.1f}x" if dense and sent else "-",
            f"{_mean(each, 'step_ms_median'):.1f}",
        )
    if bayes is not None:
        table.add_row("Bayes", *(f"{getattr(bayes, key):.4f}" for key in scores))
        table.caption = "Bayes: the true probabilities. No model scores better."
    console.print(table)
    steps = min(len(run.record.loss) for each in runs.values() for run in each)
    if steps < SHORT_STEPS:
        console.print(f"{steps:,} steps: too short to judge quality", style="yellow")


def _mean(results: list[dict], key: str) -> float:
    return float(np.mean([result[key] for result in results]))


def _spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
