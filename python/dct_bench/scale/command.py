"""dct-bench scale: the cost model, from 2 to thousands of ranks."""

import argparse
import json
from functools import partial
from pathlib import Path

from rich.console import Console

from dct_dlrm.command_line import make_folder
from dct_dlrm.errors import UsageError

from .. import provenance
from . import kernel_rates, report, tables_report, validation
from .arguments import ASSUMED_COMPUTE_MS
from .break_even import faster_by, paying_rates
from .cost_model import METHODS, Cluster, Link, Model, union_density
from .shapes import SHAPES, numel

PLAIN_WIDTH = 110  # of the output where there is no terminal to fit


def run(options: argparse.Namespace) -> int:
    """The subcommand; 0."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    if options.validate is not None:
        report.print_validation(console, validation.load(options.validate))
        return 0
    make_folder(options.out, "scale.json", "step_time.png", "break_even.png")
    if None in options.rates:
        raise UsageError("--rates must be numbers here, got unlimited")
    if options.model == "tables":
        return tables_report.run(console, options)
    model, sources = _model(options)
    steps = {
        (ranks, rate): {m: model.step(m, _cluster(options, ranks, rate)) for m in METHODS}
        for ranks in options.ranks
        for rate in options.rates
    }
    even = [
        {"ranks": ranks, "method": ours, "against": theirs}
        | {"pays": paying_rates(model, partial(_cluster, options, ranks), ours, theirs)}
        for ranks in options.ranks
        for ours in ("dct", "dct-shard")
        for theirs in ("dense", "bf16", "powersgd1")
    ]
    report.print_sources(console, sources)
    report.print_winners(console, steps)
    report.print_break_even(console, even)
    report.print_union(console, options.density, options.ranks)
    _write(options, sources, steps, even)
    report.plot_step_times(options.out / "step_time.png", steps)
    mapped = [options.gpus_per_node * 2**power for power in range(1, 14)]
    faster = faster_by(model, partial(_cluster, options), mapped)
    report.plot_break_even(options.out / "break_even.png", faster)
    console.print(f"in {options.out}: scale.json, step_time.png, break_even.png", style="dim")
    return 0


def _model(options: argparse.Namespace) -> tuple[Model, dict[str, str]]:
    """The model, and where its constants are from."""
    if options.model == "dlrm":
        shapes = SHAPES["dlrm"](options.hash_size)
    else:
        shapes = SHAPES["transformer"](options.layers, options.width)
    kernels = (
        kernel_rates.ASSUMED if options.kernels is None else kernel_rates.load(options.kernels)
    )
    given = options.compute_ms is not None
    compute_ms = options.compute_ms if given else ASSUMED_COMPUTE_MS[options.model]
    sources = {
        "model": f"{options.model}, {numel(shapes):,} parameters, density {options.density:g}",
        "compute": f"{compute_ms:g} ms, {'as given' if given else 'assumed, not measured'}",
        "kernels": kernels.source,
        "links": f"{options.alpha_us:g} us per message",
        "nodes": f"{options.gpus_per_node} ranks, {options.inside_gbytes:g} GB/s each way",
        "overlap": f"{options.overlap:g} of compute",
    }
    return Model(shapes, compute_ms / 1e3, kernels, options.density), sources


def _cluster(options: argparse.Namespace, ranks: int, rate: float) -> Cluster:
    gpus = min(ranks, options.gpus_per_node)
    if ranks % gpus:
        raise UsageError(f"--ranks must be multiples of --gpus-per-node {gpus}, got {ranks}")
    alpha = options.alpha_us / 1e6
    inside = Link(alpha, 1e9 * options.inside_gbytes)
    return Cluster(ranks // gpus, gpus, Link(alpha, rate / 8), inside, options.overlap)


def _write(options: argparse.Namespace, sources: dict, steps: dict, even: list[dict]) -> None:
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    result = {
        "provenance": provenance.describe(),
        "options": plain,
        "sources": sources,
        "steps": [
            {"ranks": ranks, "rate": rate, "method": method}
            | {"seconds": step.seconds}
            | step._asdict()
            for (ranks, rate), of_methods in steps.items()
            for method, step in of_methods.items()
        ],
        "break_even": even,
        "union_density": {p: union_density(options.density, p) for p in options.ranks},
    }
    (options.out / "scale.json").write_text(json.dumps(result, indent=1) + "\n")
