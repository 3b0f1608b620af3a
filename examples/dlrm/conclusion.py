"""Summarizes a comparison: quality, bytes, and the predicted step time at 1 Gbit/s."""

import os
from argparse import Namespace
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from bench.cost_model import CPU, Model, link_of

from .loop import Run
from .report import SHORT_STEPS, Runs, mean

RATE = 1e9  # bits per second
METHODS = {"bfloat16": "dct", "int4": "int4"}  # {--format: name in bench.cost_model}


def conclusion(runs: Runs, options: Namespace) -> str:
    """Sentences that compare "dct" with "dense"; none if one of them is missing, or on one rank."""
    ranks = dist.get_world_size()
    if not {"dense", "dct"} <= runs.keys() or ranks == 1:
        return ""
    dense, dct = runs["dense"], runs["dct"]
    factor = mean(dense, "bytes_per_step_per_rank") / mean(dct, "bytes_per_step_per_rank")
    fewer = f"{factor:.{0 if factor >= 10 else 1}f} times fewer bytes than float32"
    long = len(dense[0].record.loss) >= SHORT_STEPS
    text = f"{_quality(dense, dct)}, with {fewer}." if long else f"DCT sent {fewer}."
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) == ranks  # the ranks use no network
    if local and options.parallel == "data" and options.format in METHODS:
        text += " " + _step_times(dense, dct, options, ranks)
    return text


def _quality(dense: Sequence[Run], dct: Sequence[Run]) -> str:
    losses = np.array([[run.scores.log_loss for run in each] for each in (dense, dct)])
    change = f"log loss {losses[1].mean() - losses[0].mean():+.4f}"
    if len(dense) == 1:
        return f"One seed: {change} compared with float32"
    spread = losses.std(axis=1, ddof=1).max()
    same = abs(losses[1].mean() - losses[0].mean()) <= spread
    verdict = "Same quality within" if same else "The difference exceeds"
    return f"{verdict} the spread over seeds ({change}, spread {spread:.4f})"


def _step_times(dense: Sequence[Run], dct: Sequence[Run], options: Namespace, ranks: int) -> str:
    """Predict step times. The compute time is DCT's measured step minus the predicted exchange."""
    numel = round(mean(dense, "bytes_per_step_per_rank") * ranks / (8 * (ranks - 1)))
    model, method = Model(numel, 0.0, CPU, options.density), METHODS[options.format]

    def exchange_ms(name: str, rate: float) -> float:
        return 1e3 * model.step(name, ranks, link_of("cpu", rate)).seconds

    compute = max(0.0, mean(dct, "step_ms_median") - exchange_ms(method, np.inf))
    times = [f"{compute + exchange_ms(name, RATE):.0f} ms" for name in (method, "dense", "bf16")]
    return (
        f"Over a 1 Gbit/s link, a step would take about {times[0]}, compared with {times[1]} in "
        f"float32 and {times[2]} in bfloat16. These times are from the cost model of bench.scale, "
        f"with {compute:.0f} ms of compute, as on these ranks."
    )
