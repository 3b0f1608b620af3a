"""Runs a case in lock-step, and counts executed PTX and the corresponding machine code."""

from collections import Counter

from . import machine_code, toolkit
from .backend import BACKEND, executor
from .cases import LARGEST, NUMEL, Case
from .costs import Cost, KernelCost

RESIDENT_BLOCKS = 4  # most kernels have this number of blocks per multiprocessor


def count(case: Case, elements: int) -> Cost:
    """Return the costs per element, with the tiles of the largest timed calls."""
    executor().tile_as_for(LARGEST // NUMEL)
    try:
        totals, found = _run(case)
    finally:
        executor().tile_as_for(1)
    kernels = [_kernel(symbol, rows) for symbol, rows in found.items()]
    moved = case.nbytes / elements
    return Cost(case.op, case.detail, case.density, elements, moved, *totals, kernels=kernels)


def _run(case: Case):
    """Return the totals, and the rows of counts for each kernel."""
    executor().configure(0, RESIDENT_BLOCKS)
    case.run(BACKEND, 0)
    totals, *reports = executor().counts().split("\n\n")
    found = {}
    for report in reports:
        symbol, *rows = report.splitlines()
        found[symbol] = map(str.split, rows)
    read, written, kernels, memsets = map(int, totals.split())
    return (read, written, kernels + memsets), found


def _kernel(symbol: str, rows) -> KernelCost:
    code = machine_code.machine_code(executor().text(symbol), symbol)
    classes, sums, issues = Counter(), [0, 0], {}
    for line, issued, *numbers, opcode in rows:
        issues[int(line)] = int(issued)
        classes[class_of(opcode)] += int(issued)
        sums = [a + int(b) for a, b in zip(sums, numbers, strict=True)]
    return KernelCost(
        toolkit.demangle(symbol),
        round(code.slots(issues), 1),
        round(code.half_rate_slots(issues), 1),
        dict(sorted(classes.items())),
        *sums,
    )


def class_of(opcode: str) -> str:
    """The class of a PTX instruction."""
    name, _, rest = opcode.partition(".")
    parts = rest.split(".")
    if name in ("ld", "st", "atom", "prefetch"):
        return next((space for space in ("shared", "param") if space in parts), "global")
    if name in ("bra", "ret", "bar"):
        return "control"
    if name in ("shfl", "vote", "redux"):
        return "warp"
    if name in ("mov", "selp", "cvt", "cvta"):
        return "move"
    return "float" if parts[-1][:1] == "f" else "integer"
