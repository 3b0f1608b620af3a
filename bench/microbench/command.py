"""Runs bench.kernels: checks and times the cases, and prints the results."""

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor

from bench import files, provenance
from bench.cli import UsageError, announce_backend, make_folder
from bench.tables import line

from . import cases, native
from .arguments import settle
from .cases import Case
from .peers import CUB, EXACT
from .report import COPY, COPY_KERNEL, HEADER, OURS, row
from .timing import take_turns

SLOW_ROUNDS, SLOW_SETS = 1, 3  # for the eager backend and most peers, which are slow
DENSE = torch.contiguous_format  # a tensor without rows may have strides that forbid byte views
FIRST_LOOK_SECONDS = 1  # after this time, no further round of a case starts
UNIT = "A copy of the same number of bytes, in the same run, has speed 1. Larger is better.\n"


def run(options: argparse.Namespace) -> int:
    is_first_look = settle(options)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device must be cpu if there is no GPU, got cuda")
    if options.graphs and options.device != "cuda":
        raise UsageError("--graphs must come with --device cuda, got cpu")
    if options.json:
        make_folder(options.json.parent)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results = []
    announce_backend(options.device)
    print(_heading(options))
    print(UNIT if is_first_look else HEADER, flush=True)
    for case in cases.first_look(options.device) if is_first_look else cases.cases(options):
        result = measure(case, options, is_first_look)
        results.append(result)
        print(sentence(result) if is_first_look else line(row(result)), flush=True)
        if options.json:  # after every case, so that an interrupted run keeps results
            _write(options, results)
    return 0


def measure(
    case: Case, options: argparse.Namespace, is_first_look: bool = False, light: bool = False
) -> dict:
    """Check the results of all calls, then time them.

    With `is_first_look`, eager is timed only if it is the only backend, and a slow machine runs
    fewer rounds. With `light`, only one of our backends is timed, and results are not checked.
    """
    backends = cases.backends(options.device)
    if light:
        backends = dict([list(backends.items())[min(1, len(backends) - 1)]])
    else:
        _check(case, backends)
    calls: dict[str, Callable] = copies(case, options.device)
    for name, ops in backends.items():
        if name != "eager" or not is_first_look or len(backends) == 1:
            calls[name] = lambda i, ops=ops: case.run(ops, i)
    calls |= {name: peer.run for name, peer in case.peers.items()}
    slow = {"eager", *case.peers} - {CUB}
    rounds = {name: SLOW_ROUNDS if name in slow else options.rounds for name in calls}
    sets = {name: min(SLOW_SETS, case.sets) if name in slow else case.sets for name in calls}
    fast = [name for name in (*backends, COPY) if name != "eager"] if options.graphs else []
    seconds = FIRST_LOOK_SECONDS if is_first_look else math.inf
    timing = take_turns(calls, case.reset, sets, rounds, options.device, fast, seconds)
    return {
        "op": case.op,
        "case": case.detail,
        "numel": case.numel,
        "density": case.density,
        "bytes": case.nbytes,
        "ms": timing,
    }


def _check(case: Case, backends: dict) -> None:
    expected = None
    for name, ops in backends.items():
        got = results(case, ops)
        expected = expected or got
        for ours, theirs in zip(got, expected, strict=True):
            if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
                raise SystemExit(f"{case.op} ({case.detail}): {name} differs from eager")
    for name, peer in case.peers.items():
        case.reset(0)
        try:
            peer.check(0)
        except ValueError as error:
            raise SystemExit(f"{case.op} ({case.detail}): {name} is wrong: {error}") from None


def results(case: Case, ops) -> list[Tensor]:
    """The tensors that a call with the first buffer set returns."""
    case.reset(0)
    return [tensor.clone(memory_format=DENSE) for tensor in case.run(ops, 0)]


def copies(case: Case, device: str) -> dict[str, Callable]:
    """Calls that copy the same number of bytes: torch's copy, and on a GPU our copy kernel."""
    nbytes = max(case.nbytes // 2 // 16 * 16, 16)
    # Random numbers, like the inputs of ops, because a GPU copies zeros with less power.
    source = [torch.randn(nbytes // 4, device=device) for _ in range(case.sets)]
    target = [torch.empty_like(tensor) for tensor in source]
    copies = {COPY: lambda i: target[i].copy_(source[i])}
    if case.allocates and device == "cpu":
        copies = {COPY: lambda i: source[i].clone()}
    if native.missing() is None and device == "cuda":
        copies[COPY_KERNEL] = lambda i: native.copy(target[i], source[i])
    return copies


def sentence(result: dict) -> str:
    """Compare our best backend with a copy, and with exact top-k if exact top-k was timed."""
    ms = {name: times["median"] for name, times in result["ms"].items()}
    ours = ms[next(name for name in OURS if name in ms)]
    parts = [f"{ms[name] / ours:.3g}x as fast as exact top-k" for name in EXACT if name in ms]
    parts.append(f"{ms[COPY] / ours:.2g} of a copy's speed")
    case = f"{result['op']}, {result['numel']:,} elements, {100 * result['density']:g} % kept"
    return f"{case}: {', '.join(parts)}."


def _heading(options: argparse.Namespace) -> str:
    about = provenance.describe()
    cpu = f"{about['cpu']}, {about['instruction_set']}, threads: {options.threads}"
    where = about["gpu"] if options.device == "cuda" else cpu
    lines = [f"torch {about['torch']}, {where}, load {about['load_average']:.1f}\n"]
    if options.device == "cuda" and native.missing() is not None:
        lines.append(f"No copy kernel or cub: {native.missing()}\n")
    return "\n".join(lines)


def _write(options: argparse.Namespace, results: list[dict]) -> None:
    content = {
        "torch": torch.__version__,
        "device": options.device,
        "threads": options.threads,
        "provenance": provenance.describe(),
        "results": results,
    }
    files.write_json(options.json, content)
