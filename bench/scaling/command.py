"""bench/scale.py: the cost model, from 2 to thousands of ranks."""

import argparse
from functools import partial
from pathlib import Path

from rich.console import Console

import provenance
from dlrm import files
from dlrm.command_line import results_folder
from dlrm.errors import UsageError

from . import answer, kernel_rates, report, shapes, validation
from .arguments import ASSUMED_COMPUTE_MS, FOLDER, RESULT
from .break_even import paying_rates
from .cost_model import Cluster, Model, union_density
from .links import COSTS, link_of
from .methods import LEFT_OUT, OURS, methods_for

INSIDE_GBYTES = {"gpu": 450.0, "cpu": 10.0}
PLAIN_WIDTH = 110  # of the output where there is no terminal to fit


def run(options: argparse.Namespace) -> int:
    """The subcommand; 0."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    if options.validate is not None:
        report.print_validation(console, validation.load(options.validate))
        return 0
    _check(options)
    _resolve(options)
    is_one_link = len(options.ranks) == len(options.rates) == 1
    if options.out is not None or not is_one_link:
        options.out = results_folder(options, FOLDER, RESULT)
    model, methods, sources = _model(options)
    steps = {
        (ranks, rate): {m: model.step(m, _cluster(options, ranks, rate)) for m in methods}
        for ranks in options.ranks
        for rate in options.rates
    }
    report.print_sources(console, sources)
    if is_one_link:
        answer.print_answer(console, steps, options, model)
    if options.out is not None:
        _report(console, options, model, sources, steps, with_tables=not is_one_link)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Before anything is replaced in --out."""
    if None in options.rates:
        raise UsageError("--rates must be numbers here, got unlimited")
    if options.parameters is not None and options.compute_ms is None:
        raise UsageError("--parameters must come with --compute-ms, got none")
    for ranks in options.ranks:
        node = min(ranks, options.gpus_per_node)
        if ranks % node:
            raise UsageError(f"--ranks must be multiples of --gpus-per-node {node}, got {ranks}")


def _resolve(options: argparse.Namespace) -> None:
    """Fill in what follows from the device."""
    if options.device is None:
        import torch  # late: the help is there without it

        options.device = "gpu" if torch.cuda.is_available() else "cpu"
    if options.inside_gbytes is None:
        options.inside_gbytes = INSIDE_GBYTES[options.device]


def _model(options: argparse.Namespace) -> tuple[Model, list[str], dict[str, str]]:
    """The model, the methods of which its bytes are known, and where its constants are from."""
    methods = methods_for(options.optimizer, with_shapes=options.parameters is None)
    name, note = options.model, ""
    if options.parameters is not None:
        of_parameters = [(options.parameters,)]
        name, note = "your own", "; PowerSGD's bytes depend on their shapes, so it is left out"
    elif options.model == "dlrm":
        of_parameters = shapes.dlrm(options.hash_size)
    else:
        of_parameters = shapes.transformer(options.layers, options.width)
    kernels = kernel_rates.load(options.kernels, options.device)
    given = options.compute_ms is not None
    compute_ms = options.compute_ms if given else ASSUMED_COMPUTE_MS[options.model]
    model = Model(of_parameters, compute_ms / 1e3, kernels, options.density)
    sources = {
        "model": f"{name}, {model.numel:,} parameters, density {options.density:g}{note}",
        "compute": f"{compute_ms:g} ms, {'as given' if given else 'assumed, not measured'}",
        "optimizer": options.optimizer + (f", {LEFT_OUT}" if options.optimizer == "adamw" else ""),
        "kernels": kernels.source,
        "links": COSTS[options.device],
        "overlap": f"{options.overlap:g} of compute",
    }
    if options.alpha_us is not None:
        sources["links"] = f"{options.alpha_us:g} us per message, as given"
    if options.gpus_per_node > 1:
        inside = f"{options.inside_gbytes:g} GB/s each way inside"
        sources["nodes"] = f"{options.gpus_per_node} ranks, {inside}"
    return model, methods, sources


def _cluster(options: argparse.Namespace, ranks: int, rate: float) -> Cluster:
    gpus = min(ranks, options.gpus_per_node)
    links = [link_of(options.device, of) for of in (rate, 8e9 * options.inside_gbytes)]
    if options.alpha_us is not None:
        links = [link._replace(alpha=options.alpha_us / 1e6) for link in links]
    return Cluster(ranks // gpus, gpus, *links, options.overlap)


def _report(
    console: Console,
    options: argparse.Namespace,
    model: Model,
    sources: dict[str, str],
    steps: report.Steps,
    with_tables: bool,
) -> None:
    """Everything, in a file of --out."""
    methods = next(iter(steps.values()))
    even = [
        {"ranks": ranks, "method": ours, "against": theirs}
        | {"pays": paying_rates(model, partial(_cluster, options, ranks), ours, theirs)}
        for ranks in options.ranks
        for ours in OURS
        if ours in methods
        for theirs in ("dense", "bf16", "powersgd1")
        if theirs in methods
    ]
    if with_tables:
        report.print_winners(console, steps)
        report.print_break_even(console, even)
        report.print_union(console, options.density, options.ranks)
    _write(options, sources, steps, even)
    console.print(f"in {options.out}: {RESULT}", style="dim")


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
    files.write_json(options.out / RESULT, result)
