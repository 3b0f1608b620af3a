"""Prints a table of the kernels' machine code, in markdown: python -m static, in tests/."""

import sys
from itertools import groupby

from . import toolkit
from .kernels import THREADS, Kernel, kernels
from .promises import promise_of

COLUMNS = ("kernel", "sm", "instances", "registers", "spilled bytes", "shared bytes", "threads")
COLUMNS += ("blocks", "occupancy", "128-bit loads", "128-bit stores", "fused", "instructions")


def span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def row(group: list[Kernel]) -> list[str]:
    first = group[0]
    dynamic = promise_of(first).dynamic_shared_bytes
    blocks = [kernel.blocks(dynamic) for kernel in group]
    return [
        f"`{first.name.partition('<')[0].removesuffix('_kernel')}`",
        str(first.architecture),
        str(len(group)),
        span([kernel.registers for kernel in group]),
        span([kernel.spill_bytes for kernel in group]),
        span([kernel.static_shared_bytes + dynamic for kernel in group]),
        str(first.threads),
        span(blocks),
        span([100 * b * k.threads // THREADS for b, k in zip(blocks, group, strict=True)]) + " %",
        span([kernel.count(r"LDG\S*\.128") for kernel in group]),
        span([kernel.count(r"STG\S*\.128") for kernel in group]),
        span([kernel.fused for kernel in group]),
        span([len(kernel.instructions) for kernel in group]),
    ]


def main() -> None:
    if toolkit.missing() is not None:
        sys.exit(f"not on this machine: {toolkit.missing()}")
    found = [
        kernel
        for architecture in toolkit.ARCHITECTURES
        for source in toolkit.compile_all(toolkit.KERNELS, architecture)
        for kernel in kernels(source, architecture)
    ]

    def order(kernel: Kernel) -> tuple[str, int]:
        return kernel.name.partition("<")[0], kernel.architecture

    print(f"| {' | '.join(COLUMNS)} |")
    print("|" + "---|" * len(COLUMNS))
    for _, group in groupby(sorted(found, key=order), order):
        print(f"| {' | '.join(row(list(group)))} |")


main()
