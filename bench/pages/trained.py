"""Tables of training runs: methods beside a dense run, seed by seed.

A run is {"method", "seed", "test": {"loss", "auc", "calibration"}, "bytes_per_step"}, and may have
"rate", "validation" or "validation_loss", "problem", "steps", and "bytes" by what they are for.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

from tables import difference, mean, number, table, times

from .experiments import FEW_BITS, canonical

BASELINES = ("dense", "float32", "mp")  # what differences are from
RATE_SEED, RATE_STEPS = 0, 600  # of the runs that learning rates are chosen by
NAMES = {
    "dense": "float32",
    "bf16": "bfloat16",
    "powersgd": "PowerSGD, rank 1",
    "topk": "exact top-k",
    "dct": "hook",
    "all_gather": "hook, all-gather",
    "reduce_scatter": "hook, reduce-scatter",
    "e3m0": "hook, e3m0",
    "mp": "one group of all ranks",
    "accordion": "Accordion",
    "accordion-ternary": "Accordion, int4 and ternary",
    "ahead": "SAEF",
    "ahead-ternary": "SAEF, every entry in ternary",
}
OTHERS = {"postlocal": "float32 weights averaged", "diloco": "DiLoCo", "sparseloco": "SparseLoCo"}
WITH = {"": "", "dedup": ", distinct rows", "hook": ", and the hook"}
PROBLEMS = {
    "text-adamw": "Transformer, AdamW, constant rate",
    "text-adamw-cosine": "Transformer, AdamW, cosine",
    "text-adamw-wsd": "Transformer, AdamW, warm-up-stable-decay",
    "text-momentum": "Transformer, SGD with momentum",
    "text-sgd": "Transformer, SGD",
    "text-muon": "Transformer, Muon",
    "clicks-sgd": "DLRM, SGD",
    "clicks-adam": "DLRM, row-wise AdaGrad and Adam",
    "mlp-adam-cosine": "MLP, Adam, cosine",
    "tables-adam-cosine": "DLRM, Adam, cosine",
    "finetune-adamw-cosine": "Transformer, fine-tuning, AdamW, cosine",
    "python-adamw-cosine": "Transformer on Python sources, AdamW, cosine",
    "python-muon-cosine": "Transformer on Python sources, Muon, cosine",
    "clicks-sgd-cosine": "DLRM, SGD, cosine",
    "clicks-momentum-cosine": "DLRM, SGD with momentum, cosine",
}
PURPOSES = {  # of a run's bytes, in the order of the table
    "ids": "ids",
    "counts": "counts",
    "mp_forward": "rows forward",
    "mp_backward": "rows backward",
    "sync": "syncs",
    "dp": "gradients",
    "node": "inside the node",
}
NOTE = (
    "± after a mean is the standard deviation over seeds; after a difference, which is taken seed "
    "by seed, it is the standard error. *At most* is the worst seed's difference."
)


def accepts(run: dict) -> bool:
    return {"method", "seed"} <= run.keys()


def groups(runs: Iterable[dict]) -> dict[tuple, list[dict]]:
    """Runs by problem and length."""
    found: dict[tuple, list[dict]] = {}
    for run in runs:
        found.setdefault((problem(run), run.get("steps", 0)), []).append(run)
    return found


def problem(run: dict) -> str:
    """What was trained, with the schedule of its rate; a constant one is not named."""
    name, schedule = run.get("problem", ""), run.get("schedule", "constant")
    return name if schedule == "constant" else f"{name}-{schedule}"


def best(runs: Sequence[dict], among: Sequence[dict] = ()) -> dict[str, list[dict]]:
    """{method: its runs at its best rate, by seed}: of one problem and length.

    The best rate has the lowest validation loss, the mean over the seeds that all rates have, after
    as many steps; or after 600, of `among`, the problem's runs of any length, where not all rates
    were tried for as long.
    """
    found: dict[str, list[dict]] = {}
    for name in dict.fromkeys(run["method"] for run in runs):
        own = [run for run in runs if run["method"] == name and "diverged" not in run]
        rates = {run.get("rate") for run in own}
        if len(rates) > 1:
            tried = [run for run in among if run["method"] == name and "diverged" not in run]
            same = _validated(own)
            short = _validated(run for run in tried if run.get("steps") == RATE_STEPS)
            losses = same if rates <= same.keys() else short
            rates = {min(rates, key=lambda rate: losses.get(rate, math.inf))}
        chosen = [run for run in own if run.get("rate") in rates and "test" in run]
        if chosen:
            found[name] = sorted(chosen, key=lambda run: run["seed"])
    return found


def _validated(runs: Iterable[dict]) -> dict[float, float]:
    """{rate: its validation loss, the mean over the seeds that all rates have}."""
    losses: dict[float, dict[int, float]] = {}
    for run in runs:
        if validation(run) is not None:
            losses.setdefault(run["rate"], {})[run["seed"]] = validation(run)
    seeds = set.intersection(*map(set, losses.values())) if losses else set()
    return {rate: statistics.mean(own[s] for s in seeds) for rate, own in losses.items() if seeds}


def validation(run: dict) -> float | None:
    return run.get("validation", {}).get("loss", run.get("validation_loss"))


def over(runs: Sequence[dict], dense: Sequence[dict], score: str = "loss") -> list[float]:
    """Differences of the test part's score, seed by seed."""
    of_seed = {run["seed"]: run["test"][score] for run in dense}
    return [r["test"][score] - of_seed[r["seed"]] for r in runs if r["seed"] in of_seed]


def sent(runs: Sequence[dict]) -> float:
    """Bytes that a rank sends in a step: all, or of rows and syncs where these are compared."""
    if "bytes_per_step" in runs[0]:
        return runs[0]["bytes_per_step"]
    return sum(bytes_of(runs, key) or 0 for key in ("mp_forward", "mp_backward", "sync"))


def bytes_of(runs: Sequence[dict], purpose: str) -> float | None:
    """Of what it sends, the mean over seeds: how many rows are distinct is the batches' affair."""
    found = [run["bytes"][purpose] for run in runs if purpose in run.get("bytes", {})]
    return statistics.mean(found) if found else None


def factor(runs: Sequence[dict], dense: Sequence[dict]) -> str:
    """How many times fewer bytes they send than the dense runs."""
    if not dense or not sent(runs) or not sent(dense):
        return ""
    return times(sent(dense) / sent(runs))


START = 2  # steps that the hook begins with in bfloat16


def steady(runs: Sequence[dict], dense: Sequence[dict]) -> str:
    """How many times fewer the hook sends than float32 once its first steps are over."""
    steps, whole = runs[0]["steps"], dense[0]["bytes_per_step"]
    later = (runs[0]["bytes_per_step"] * steps - START * whole / 2) / (steps - START)
    return times(whole / later)


def of_distinct(runs: Sequence[dict]) -> str:
    """How many times fewer bytes than float32 rows that are sent once, where that is known."""
    distinct = bytes_of(runs, "distinct_float32")
    return times(distinct / sent(runs)) if distinct else ""


def baseline(methods: dict[str, list[dict]]) -> list[dict]:
    return next((methods[name] for name in BASELINES if name in methods), [])


def scores(runs: Sequence[dict], among: Sequence[dict] = ()) -> str:
    """The table of one problem and length; with other rates that have several seeds."""
    methods = best(runs, among)
    dense = baseline(methods)
    rows = [(label(name), own) for name, own in methods.items()]
    for name, own in methods.items():
        others = {run.get("rate") for run in runs if run["method"] == name} - {own[0].get("rate")}
        for rate in sorted(others):
            also = [run for run in runs if (run["method"], run.get("rate")) == (name, rate)]
            also = sorted((run for run in also if "test" in run), key=lambda run: run["seed"])
            if len(also) > 1:
                rows.append((f"{label(name)}, at another rate", also))
    rows.sort(key=lambda row: (row[1] is not dense, -sent(row[1])))
    purposes = [key for key in PURPOSES if any(key in run.get("bytes", {}) for run in runs)]
    headings = ["method", *(PURPOSES[key] for key in purposes)]
    headings += ["bytes per step", "fewer by", "than float32's distinct rows"]
    headings += ["AUC", "AUC, difference", "loss", "worst seed", "loss, difference", "at most"]
    headings += ["vNMSE at step 10", "calibration", "rate", "ms per step", "seeds"]
    lost = [run for run in runs if "diverged" in run]
    return table(headings, [_row(name, own, dense, purposes, lost) for name, own in rows])


def _row(name: str, own: list[dict], dense: list[dict], purposes: list, lost: list) -> list[str]:
    tests = [run["test"] for run in own]
    losses = over(own, dense) if own is not dense else []
    has_auc = own is not dense and all("auc" in run["test"] for run in [*own, *dense])
    row = [name, *(number(bytes_of(own, key)) for key in purposes)]
    row += [number(sent(own)), factor(own, dense), of_distinct(own)]
    row.append(mean([test["auc"] for test in tests if "auc" in test]))
    row.append(difference(over(own, dense, "auc")) if has_auc else "")
    row += [mean([test["loss"] for test in tests]), f"{max(t['loss'] for t in tests):.4f}"]
    row += [difference(losses), f"{max(losses):+.4f}" if losses else ""]
    errors = [run["vnmse"]["10"] for run in own if "vnmse" in run]
    row.append(f"{statistics.mean(errors):.2g}" if any(errors) else "")
    row.append(mean([test["calibration"] for test in tests if "calibration" in test], 3))
    row.append("" if own[0].get("rate") is None else f"{own[0]['rate']:g}")
    ms = [run["step_ms"] for run in own if "step_ms" in run]
    row.append(f"{statistics.median(ms):.1f} ({min(ms):.1f}-{max(ms):.1f})" if ms else "")
    same = [run for run in lost if _setting(run) == _setting(own[0])]
    return [*row, f"{len(own)}{f', {len(same)} more diverged' if same else ''}"]


def _setting(run: dict) -> tuple:
    return run["method"], run.get("rate")


def rates_tried(runs: Sequence[dict]) -> str:
    """Validation losses of seed 0 by rate; nothing where there was one rate."""
    tried: dict[str, dict[float, str]] = {}
    for run in runs:
        if run["seed"] == RATE_SEED and run.get("rate") is not None:
            loss = validation(run)
            said = "diverged" if "diverged" in run else "" if loss is None else f"{loss:.4f}"
            tried.setdefault(run["method"], {})[run["rate"]] = said
    if max(map(len, tried.values()), default=0) < 2:
        return ""
    rates = sorted({rate for losses in tried.values() for rate in losses})
    order = sorted(tried, key=lambda name: (name not in BASELINES, name))
    rows = [[label(name), *(tried[name].get(rate, "") for rate in rates)] for name in order]
    return table(["validation loss, seed 0, at rate", *(f"{rate:g}" for rate in rates)], rows)


def render(runs: Sequence[dict]) -> str:
    """Tables of every problem and length among the runs."""
    found = []
    among = groups(runs)
    for (name, steps), own in among.items():
        if len(among) > 1:
            found.append(f"**{PROBLEMS.get(name, name)}, {steps:,} steps**")
        of_problem = [run for run in runs if problem(run) == name]
        if any("test" in run for run in own):
            found.append(scores(own, of_problem))
        found.append(rates_tried(own))
    return "\n\n".join(text for text in found if text)


def report(records: Iterable[dict]) -> str:
    """Of runs as their bench (mp_formats.py and its like) has written them."""
    return f"{NOTE}\n\n{render([canonical(record) for record in records])}"


def label(method: str) -> str:
    """A method's name in plain words; one that is not known as it is."""
    name, _, version = method.partition(" ")
    name, *settings = name.split(",") if "=" in name else [name]
    kind, _, rest = name.partition(":")
    density, by, period = rest.partition("x")
    said = _label(kind, density.replace("%", " %"), period if by else "") or name
    said = ", ".join([said, *(setting.replace("=", " ") for setting in settings)])
    if not version:
        return said
    return f"{said}, {version}" if rest else method


def _label(kind: str, density: str, period: str) -> str:
    local, _, format = kind.partition("-")
    format = format.removeprefix("blocks-")
    if local == "blocks":
        return f"every entry in {format}"
    if local == "local":
        part = "every entry" if density in ("100 %", "") else density
        often = "every step" if period == "1" else f"every {period} steps"
        return f"local steps, {part}{f' in {format}' if format else ''}, {often}"
    if kind in OTHERS:
        return f"{OTHERS[kind]}{f', {density}' if density else ''}, every {period} steps"
    if kind in FEW_BITS:
        return f"hook, every entry in {kind}"
    if kind in NAMES:
        return f"{NAMES[kind]}{f', {density}' if density else ''}"
    return "" if density else _replicas(kind) if "/" in kind else _rows(kind)


def _replicas(kind: str) -> str:
    """Of two_dimensional."""
    optimizer, period, *format = kind.split("/")
    how = {"c1": "", "scaled": ", accumulators halved", "delayed": ", delayed accumulators"}
    sent_as = f", {format[0].replace('dct', 'DCT')}" if format else ""
    return f"2 replicas, every {period}{how.get(optimizer, f', {optimizer}')}{sent_as}"


def _rows(kind: str) -> str:
    """Of mp_formats, or torchrec_dlrm."""
    formats, _, more = kind.partition("+")
    forward, comma, backward = formats.partition(",")
    text = f"{forward} forward, {backward} backward" if comma and forward != backward else forward
    return text.replace("%", " %") + WITH[more]
