"""What is left of a training: summary.json, history.json and a table."""

from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from . import files
from .loop import Run, Scores

Runs = dict[str, list[Run]]  # by mode
Bayes = Scores  # of the true probabilities
SHORT_STEPS = 300  # in fewer, much of what modes differ by is that gradients come late
MEAN_BYTES, MAX_BYTES = "wire_bytes_per_step_per_rank", "wire_bytes_per_step_max_rank"


def write_summary(folder: Path, config: dict, data: dict, runs: Runs, bayes: Bayes | None) -> None:
    """summary.json: {"config", "data", "modes": {mode: [one object per seed]}, "bayes"}.

    "bayes", what no model can beat on these test rows, is there for generated data only.
    """
    summary = {"config": config, "data": data}
    summary["modes"] = {mode: [run.summary() for run in of_mode] for mode, of_mode in runs.items()}
    if bayes is not None:
        summary["bayes"] = bayes._asdict()
    files.write_json(folder / "summary.json", summary)


def write_history(folder: Path, runs: Runs) -> None:
    """history.json: {mode: [per seed: per-step "loss", "step_ms", "wire_bytes"; "density"]}.

    "density" holds [step, mean density of the up to 100 steps before it] pairs.
    """
    history = {
        mode: [
            {
                "seed": run.seed,
                "loss": run.loss.round(5).tolist(),
                "step_ms": run.step_ms.round(3).tolist(),
                "wire_bytes": run.wire_bytes.astype(int).tolist(),
                "density": run.density,
            }
            for run in of_mode
        ]
        for mode, of_mode in runs.items()
    }
    files.write_json(folder / "history.json", history)


def line(mode: str, run: Run) -> str:
    """One run in one line."""
    result = run.summary()
    scores = f"AUC {result['auc']:.4f}, log loss {result['log_loss']:.4f}, "
    if "validation_auc" in result:
        scores += (
            f"validation AUC {result['validation_auc']:.4f}, "
            f"log loss {result['validation_log_loss']:.4f}, "
        )
    return (
        f"{mode} seed {run.seed}: {scores}"
        f"{result[MEAN_BYTES]:,.0f} bytes and "
        f"{result['step_ms_median']:.1f} ms per step"
    )


def print_table(console: Console, runs: Runs, bayes: Bayes | None, local_size: int = 1) -> None:
    """Modes side by side: mean and standard deviation over seeds; bytes per rank.

    Bytes are the mean over ranks; beside it, where they differ, of the rank that sends most. Where
    nodes have several ranks, those of a mesh go to other nodes from every rank, those of a ring
    from one rank of the node: they are compared by what leaves a node. What else crosses where
    tables are sharded goes to all ranks: with a mesh, gradients alone are compared.
    """
    table = Table("mode", box=SIMPLE_HEAD, pad_edge=False)
    scores = {"auc": "AUC", "log_loss": "log loss", "calibration": "calibration"}
    if all("validation_auc" in run.summary() for of_mode in runs.values() for run in of_mode):
        scores |= {"validation_auc": "validation AUC", "validation_log_loss": "log loss"}
    uneven = any(_mean(runs, mode, MAX_BYTES) > _mean(runs, mode, MEAN_BYTES) for mode in runs)
    sizes = ("bytes/step", "at most") if uneven else ("bytes/step",)
    for heading in (*scores.values(), *sizes, "fewer by", "ms/step"):
        table.add_column(heading, justify="right", no_wrap=True)
    dense = _mean(runs, "dense", MEAN_BYTES) if "dense" in runs else 0
    sharded = all("ids" in run.purposes for of_mode in runs.values() for run in of_mode)
    for mode in runs:
        sent, has_mesh = _mean(runs, mode, MEAN_BYTES), _has_mesh(runs, mode)
        leaving = sent * (local_size if has_mesh else 1)
        is_comparable = dense and leaving and not (sharded and has_mesh)
        table.add_row(
            mode,
            *(_spread(runs, mode, key) for key in scores),
            f"{sent:,.0f}",
            *([f"{_mean(runs, mode, MAX_BYTES):,.0f}"] if uneven else []),
            f"{dense / leaving:.1f}x" if is_comparable else "-",
            f"{_mean(runs, mode, 'step_ms_median'):.1f}",
        )
    if bayes is not None:
        table.add_row("Bayes", *(f"{score:.4f}" for score in bayes))
        table.caption = "Bayes: the true probabilities, which no model beats"
    console.print(table)
    steps = min(len(run.loss) for of_mode in runs.values() for run in of_mode)
    if steps < SHORT_STEPS:
        console.print(f"{steps:,} steps: too short to judge quality", style="yellow")
    for mode in (mode for mode in runs if _has_mesh(runs, mode)):
        inside = _mean(runs, mode, "node_bytes_per_step_per_rank")
        text = (
            f"{mode}: bytes {'of DP ' if sharded else ''}to other nodes; inside its node a rank "
            f"sends {inside:,.0f} more; fewer by: of what leaves a node"
        )
        console.print(text, markup=False, highlight=False)
    if sharded:
        console.print(_purposes(runs, local_size))


def _purposes(runs: Runs, local_size: int) -> Table:
    """What the bytes of sharded tables are for. Ids are no part of what modes compress."""
    table = Table("bytes/step", box=SIMPLE_HEAD, pad_edge=False)
    synced = all("sync" in run.purposes for of_mode in runs.values() for run in of_mode)
    headings = ["ids", "MP forward", "MP backward", "fewer by", "DP", "fewer by"]
    for heading in (*headings, "sync", "fewer by") if synced else headings:
        table.add_column(heading, justify="right", no_wrap=True)

    def sent(mode: str, *purposes: str) -> float:
        return sum(_mean(runs, mode, f"{name}_bytes_per_step_per_rank") for name in purposes)

    def fewer(mode: str, *purposes: str, times: int = 1) -> str:
        dense = sent("dense", *purposes) if "dense" in runs else 0
        leaving = times * sent(mode, *purposes)
        return f"{dense / leaving:.1f}x" if dense and leaving else "-"

    for mode in runs:
        table.add_row(
            mode,
            f"{sent(mode, 'ids'):,.0f}",
            f"{sent(mode, 'mp_forward'):,.0f}",
            f"{sent(mode, 'mp_backward'):,.0f}",
            fewer(mode, "mp_forward", "mp_backward"),
            f"{sent(mode, 'dp'):,.0f}",
            fewer(mode, "dp", times=local_size if _has_mesh(runs, mode) else 1),
            *([f"{sent(mode, 'sync'):,.0f}", fewer(mode, "sync")] if synced else []),
        )
    return table


def _has_mesh(runs: Runs, mode: str) -> bool:
    return "node" in runs[mode][0].purposes


def _values(runs: Runs, mode: str, key: str) -> list[float]:
    return [run.summary()[key] for run in runs[mode]]


def _mean(runs: Runs, mode: str, key: str) -> float:
    return float(np.mean(_values(runs, mode, key)))


def _spread(runs: Runs, mode: str, key: str) -> str:
    values = _values(runs, mode, key)
    if None in values:  # of a run that an earlier version finished
        return "-"
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
