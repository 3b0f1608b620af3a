"""Loads the finished runs of an experiment (one JSON file per run), and makes tables of runs.

Keys of a run: "problem" (runs of one problem are compared), "method", "rate", "seed", "settings"
(equal in all runs of a folder), "validation" and optionally "test" (scores by name, including
"loss"), and "bytes" (per rank and step, by purpose).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bench.cli import UsageError
from bench.tables import difference, mean, number, table, times
from dlrm.scores import Scores

RATE_SEED = 0  # the seed of runs that select learning rates
BASELINES = ("dense", "float32")


def path(folder: Path, run: dict) -> Path:
    """The path of a run's file."""
    name = f"{run['problem']}_{run['method']}_lr{run['rate']:g}_seed{run['seed']}"
    kept = {ord(" "): "_", ord("%"): "percent"} | dict.fromkeys(map(ord, ",:=+"), "-")
    return folder / f"{name.lstrip('_').translate(kept)}.json"


def settings_of(options: argparse.Namespace, *names: str) -> dict[str, object]:
    """The values of the options `names`, in the form that a run stores."""
    found = {name: getattr(options, name) for name in names}
    return found | {"data": options.data and options.data.name}


def load(folder: Path, settings: dict[str, object]) -> list[dict]:
    """Load all finished runs in `folder`."""
    records = [json.loads(file.read_text()) for file in sorted(folder.glob("*_seed*.json"))]
    for run in records:
        if run["settings"] != settings:
            got = f"{run['settings']} and {settings}"
            raise UsageError(f"--out must hold runs of one setting, got {got}")
    return records


def scores(found: Scores) -> dict[str, float]:
    """The scores in the form that a run stores. All tasks have a "loss"."""
    return {"auc": found.auc, "loss": found.log_loss, "calibration": found.calibration}


def best_rate(records: Sequence[dict], problem: str, method: str) -> float | None:
    """The rate with the lowest validation loss, averaged over the seeds that all rates have."""
    losses: dict[float, dict[int, float]] = {}
    for run in records:
        if (run["problem"], run["method"]) == (problem, method) and "diverged" not in run:
            losses.setdefault(run["rate"], {})[run["seed"]] = run["validation"]["loss"]
    if len(losses) == 1:
        return next(iter(losses))
    seeds = set.intersection(*map(set, losses.values())) if losses else set()
    sums = {rate: sum(of_seed[seed] for seed in seeds) for rate, of_seed in losses.items()}
    return min(sums, key=sums.get) if seeds else None


def tables(records: Sequence[dict]) -> str:
    """Render a Markdown table for each problem, with each method at its best rate.

    Scores are means and standard deviations over seeds. Differences from the baseline are computed
    per seed; the table shows the mean, standard error and maximum of the differences.
    """
    problems: dict[str, dict[str, list[dict]]] = {}
    for run in sorted(records, key=lambda run: run["seed"]):
        problem, method = run["problem"], run["method"]
        if "test" in run and run["rate"] == best_rate(records, problem, method):
            problems.setdefault(problem, {}).setdefault(method, []).append(run)
    found = []
    for problem, methods in problems.items():
        first = next(iter(methods.values()))[0]
        dense = next((methods[name] for name in BASELINES if name in methods), [])
        headings = ["method", *first["bytes"], "fewer bytes", *first["test"], "worst loss"]
        headings += ["loss vs. baseline", "worst vs. baseline", "rate", "seeds"]
        ordered = sorted(methods.items(), key=lambda item: -_sent(item[1]))
        rows = [[name, *_row(runs, dense)] for name, runs in ordered]
        found += [f"**{problem}**"] * bool(problem) + [table(headings, rows)]
    return "\n\n".join(found) + "\n"


def _sent(runs: Sequence[dict]) -> float:
    """The bytes of gradients or rows that a rank sends per step, without ids: a mean over runs."""
    sent = [sum(n for name, n in run["bytes"].items() if name != "ids") for run in runs]
    return sum(sent) / len(sent)


def _row(runs: Sequence[dict], dense: Sequence[dict]) -> list[str]:
    pairs = over(runs, dense)
    tests = [run["test"] for run in runs]
    return [
        *(number(sum(run["bytes"][key] for run in runs) / len(runs)) for key in runs[0]["bytes"]),
        times(_sent(dense) / _sent(runs)) if dense else "",
        *(mean([test[key] for test in tests]) for key in tests[0]),
        f"{max(test['loss'] for test in tests):.4f}",
        difference(pairs),
        f"{max(pairs):+.4f}" if pairs else "",
        f"{runs[0]['rate']:g}",
        str(len(runs)),
    ]


def over(runs: Sequence[dict], dense: Sequence[dict]) -> list[float]:
    """For each seed, the test loss minus the test loss of the dense run."""
    by_seed = {run["seed"]: run["test"]["loss"] for run in dense}
    return [r["test"]["loss"] - by_seed[r["seed"]] for r in runs if r["seed"] in by_seed]
