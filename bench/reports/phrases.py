"""Figures from results that stand in sentences of README.md and docs/guide (blocks.py)."""

import statistics
from collections.abc import Callable, Mapping

from . import figures, trained
from .experiments import Experiment
from .markdown import times

Experiments = Mapping[str, Experiment]
PHRASES: dict[str, Callable[[Experiments], str]] = {}


def phrase(make: Callable[[Experiments], str]) -> Callable[[Experiments], str]:
    PHRASES[make.__name__.replace("_", "-")] = make
    return make


@phrase
def factors(experiments: Experiments) -> str:
    """README's first sentence: the least and the most of its table of methods."""
    runs = figures.cosine(experiments)
    dense = trained.sent(trained.baseline(runs))
    found = (dense / trained.sent(runs[name]) for name in ("int4", "local-ternary:100%x10"))
    return " to ".join(f"{float(f'{factor:.1g}'):g}" for factor in found)


@phrase
def compute_ms(experiments: Experiments) -> str:
    """Of a step of the headline, over its methods."""
    (run,) = experiments["link_one_threshold"].runs
    spent = [cell["phases_ms"]["compute"] for cell in run["cells"]]
    return f"{min(spent):.0f} to {max(spent):.0f} ms"


@phrase
def sparse_adamw(experiments: Experiments) -> str:
    """What the hook loses at 1 % under AdamW and cosine."""
    runs = experiments["thresholds"].of_part("text")
    methods = trained.best([run for run in runs if run["problem"] == figures.COSINE])
    return f"{statistics.mean(trained.over(methods['dct:1%'], methods['dense'])):.2f}"


@phrase
def four_ranks(experiments: Experiments) -> str:
    """What local steps in ternary, every tenth, lose there after 3,000 steps."""
    return _lost(experiments, "ranks_4", "local-ternary:100%x10")


@phrase
def larger_model(experiments: Experiments) -> str:
    """What they lose on a model ten times larger, after 600 steps."""
    return _lost(experiments, "large", "local-ternary:100%x10")


@phrase
def larger_model_int4(experiments: Experiments) -> str:
    return _lost(experiments, "large", "int4")


def _lost(experiments: Experiments, part: str, method: str) -> str:
    methods = trained.best(experiments["text_more"].of_part(part))
    return f"{statistics.mean(trained.over(methods[method], methods['dense'])):.2f}"


def _density(experiments: Experiments) -> dict:
    runs = experiments["thresholds_cost"].of_part("density")
    return next(run for run in runs if run[""] == "now" and run["asked"] == "0.5 %")


@phrase
def densities(experiments: Experiments) -> str:
    """Sent by the hook at 0.5 %, 5 to 95 % of the steps."""
    low, high = _density(experiments)["sent"].rstrip(")").split("(")[1].split("-")
    return f"{low} to {high} %"


@phrase
def overflowed(experiments: Experiments) -> str:
    """Of the payloads of the hook at 0.5 %."""
    return _density(experiments)["overflowed"]


def _sixteen(experiments: Experiments) -> tuple[list, list, list]:
    found = trained.best(experiments["reduce_scatter_16"].runs)
    return found["dct:0.5%"], found["reduce_scatter:0.5%"], found["dense"]


@phrase
def reduce_scatter_bytes(experiments: Experiments) -> str:
    """Once the first steps are over."""
    gather, scatter, dense = _sixteen(experiments)
    return times(trained.later(gather, dense) / trained.later(scatter, dense))


@phrase
def reduce_scatter_loss(experiments: Experiments) -> str:
    gather, scatter, _ = _sixteen(experiments)
    return f"{statistics.mean(trained.over(scatter, gather)):.3f}"


@phrase
def auc_spreads(experiments: Experiments) -> str:
    """Of float32 over seeds, on Kaggle's rows and on generated ones."""
    found = []
    for methods in figures.row_runs(experiments):
        found.append(statistics.stdev(run["test"]["auc"] for run in methods["float32"]))
    return " and ".join(f"{spread:.4f}" for spread in found)
