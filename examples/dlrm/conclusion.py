"""What a comparison shows: quality, bytes, and the predicted step time on a slower link."""

import os
from argparse import Namespace
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from bench.cost_model import CPU, Link, Model, link_of

from .loop import Run
from .report import SHORT_STEPS, Runs, mean

RATE = 1e9  # bits per second
METHODS = {"bfloat16": "dct", "int4": "int4"}  # names in bench.cost_model, by --format


def conclusion(runs: Runs, options: Namespace) -> str:
    """One or two sentences that compare "dct" with "dense"; empty if either was not run."""
    if not {"dense", "dct"} <= runs.keys():
        return ""
    dense, dct = runs["dense"], runs["dct"]
    factor = mean(dense, "bytes_per_step_per_rank") / mean(dct, "bytes_per_step_per_rank")
    fewer = f"{factor:.{0 if factor >= 10 else 1}f} times fewer bytes than float32"
    long = len(dense[0].record.loss) >= SHORT_STEPS
    text = f"{_quality(dense, dct)}, with {fewer}." if long else f"DCT sent {fewer}."
    ranks = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) == ranks > 1  # steps exclude a network
    if local and options.parallel == "data" and options.format in METHODS:
        text += " " + _step_times(dense, dct, options, ranks)
    return text


def _quality(dense: Sequence[Run], dct: Sequence[Run]) -> str:
    losses = [[run.scores.log_loss for run in each] for each in (dense, dct)]
    change = np.mean(losses[1]) - np.mean(losses[0])
    if len(dense) == 1:
        return f"Log loss {change:+.4f} compared with float32 (one seed, so the spread is unknown)"
    spread = max(np.std(each, ddof=1) for each in losses)
    if abs(change) <= spread:
        return f"Same quality within the spread (log loss {change:+.4f}, spread {spread:.4f})"
    return f"Log loss {change:+.4f} compared with float32 (spread {spread:.4f})"


def _step_times(dense: Sequence[Run], dct: Sequence[Run], options: Namespace, ranks: int) -> str:
    """Compute is the loopback step of DCT, which exchanges little, minus its predicted exchange."""
    numel = round(mean(dense, "bytes_per_step_per_rank") * ranks / (8 * (ranks - 1)))
    model = Model(numel, 0.0, CPU, options.density)
    method, link = METHODS[options.format], link_of("cpu", RATE)
    loopback: Link = link_of("cpu", np.inf)
    step = mean(dct, "step_ms_median")
    compute = max(0.0, step - 1e3 * model.step(method, ranks, loopback).seconds)
    ours, float32, bfloat16 = (
        f"{compute + 1e3 * model.step(name, ranks, link).seconds:.0f} ms"
        for name in (method, "dense", "bf16")
    )
    return (
        f"Over a 1 Gbit/s link a step would take about {ours}, with float32 {float32} and with "
        f"bfloat16 {bfloat16} (computed by the model of bench.scale, with {compute:.0f} ms of "
        "compute as on these ranks)."
    )
