"""`PYTHONPATH=tools python -m ptx` counts the cost of kernels without a GPU."""

import argparse
import sys
from collections.abc import Iterable, Iterator

from . import cases, costs, counting, toolkit
from .costs import LANES, SECTOR, Cost

DESCRIPTION = """\
Counts the cost of op calls without a GPU. Executes nvcc's PTX for sm_90 in lock-step (all lanes of
a warp together), and uses ptxas to map each line to machine code. Needs nvcc, and cuobjdump and
nvdisasm from the same toolkit or an installed Triton.

  report      prints a Markdown table with the cost per element. To measure times, use a GPU and
              bench/gpu/check.py.
  baseline    writes the counts to ptx/baseline.json. A test fails if issue slots or sectors exceed
              these by more than 2 %. Use it after a change that intentionally costs more.

Columns, per element (for sample_threshold, per sample):
  must move   bytes that any kernel must read and write
  moves       bytes in whole 32-byte sectors, counted once: memory traffic with an infinite cache
  asks for    bytes in whole sectors, counted for each instruction of a warp: the cache's traffic
  issue slots machine instructions that warps issue, times 32 lanes
  half rate   the part of issue slots that runs at half rate: integers, comparisons, moves
  PTX         PTX instructions that warps issue, times 32 lanes
  active      active lanes in PTX instructions
"""


COLUMNS = ("call", "must move", "moves", "asks for", "issue slots", "half rate", "PTX")
COLUMNS += ("active", "most of it")


def table(counted: Iterable[Cost]) -> Iterator[str]:
    """Yield the lines of a Markdown table of costs."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|" + "---|" * len(COLUMNS)
    for cost in counted:
        yield f"| {' | '.join(_cells(cost))} |"


def _cells(cost: Cost) -> list[str]:
    def sum_of(field: str) -> float:
        return sum(getattr(kernel, field) for kernel in cost.kernels)

    classes: dict[str, int] = {}
    for kernel in cost.kernels:
        for name, issued in kernel.classes.items():
            classes[name] = classes.get(name, 0) + issued
    ptx = sum(classes.values())
    most = sorted(classes, key=classes.__getitem__, reverse=True)[:3]
    return [
        cost.name,
        f"{cost.bytes:.2f}",
        f"{cost.moved:.2f}",
        f"{SECTOR * sum_of('sectors') / cost.elements:.2f}",
        f"{cost.slots:.1f}",
        f"{cost.half_rate:.1f}",
        f"{LANES * ptx / cost.elements:.1f}",
        f"{100 * sum_of('threads') / (LANES * ptx):.0f} %",
        ", ".join(f"{name} {100 * classes[name] / ptx:.0f} %" for name in most),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m ptx", description=DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("report", "baseline"))
    parser.add_argument(
        "--ops",
        type=lambda text: text.split(","),
        help=f"report only these ops, separated by commas: {', '.join(cases.OPS)}",
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.ops or ()) - set(cases.OPS))
    if unknown:
        parser.error(f"--ops must be some of {', '.join(cases.OPS)}, got {', '.join(unknown)}")
    if toolkit.missing() is not None:
        sys.exit(f"python -m ptx needs {toolkit.missing()}")
    chosen = arguments.ops if arguments.command == "report" else None
    makers = [make for make in cases.CASES if chosen is None or make.op in chosen]
    counted = [counting.count(make(), make.elements) for make in makers]
    if arguments.command == "baseline":
        costs.save(toolkit.nvcc_version(), counted)
    else:
        print(f"nvcc {toolkit.nvcc_version()}; counted, not measured\n")
        print(*table(counted), sep="\n")


main()
