"""python -m ptx, in tools/: counts what kernels cost, without a GPU."""

import argparse
import sys
from collections.abc import Iterable, Iterator

from . import cases, costs, counting, toolkit
from .costs import LANES, SECTOR, Cost

DESCRIPTION = """\
Counts what calls of the ops cost, without a GPU. nvcc's PTX for sm_90 is executed in lock-step (all
lanes of a warp together); ptxas says what machine code each line became. Needs nvcc, and cuobjdump
and nvdisasm of the same toolkit or of an installed Triton.

  report      prints a table in markdown: what an element costs. How long that takes only a GPU
              says (bench/gpu/check.py).
  baseline    writes the counts to ptx/baseline.json. A test fails if issue slots or sectors exceed
              it by more than 2 %, so write it after a change that is meant to cost more.

Columns, of one element (a pick of sample_threshold):
  must move   bytes that any kernel would have to read and write
  moves       bytes in whole 32-byte sectors, each once: what memory sees behind a large cache
  asks for    bytes in whole sectors, once for each instruction of a warp: what the cache sees
  issue slots instructions of machine code that warps issue, times 32 lanes
  half rate   those of them that a pipe takes at half that rate: integers, comparisons, moves
  PTX         the same of PTX
  active      lanes that did something in it
  conflicts   passes through shared memory beyond the first of each access, times 32
"""


COLUMNS = ("call", "must move", "moves", "asks for", "issue slots", "half rate", "PTX")
COLUMNS += ("active", "conflicts", "most of it")


def table(counted: Iterable[Cost]) -> Iterator[str]:
    """In markdown."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|" + "---|" * len(COLUMNS)
    for cost in counted:
        yield f"| {' | '.join(_cells(cost))} |"


def _cells(cost: Cost) -> list[str]:
    def sum_of(what: str) -> float:
        return sum(getattr(kernel, what) for kernel in cost.kernels)

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
        f"{LANES * sum_of('conflicts') / cost.elements:.1f}",
        ", ".join(f"{name} {100 * classes[name] / ptx:.0f} %" for name in most),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m ptx", description=DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("report", "baseline"))
    parser.add_argument(
        "--ops",
        type=lambda text: text.split(","),
        help=f"report only these, separated by commas: {', '.join(cases.OPS)}",
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.ops or ()) - set(cases.OPS))
    if unknown:
        parser.error(f"--ops must be of {', '.join(cases.OPS)}, got {', '.join(unknown)}")
    if toolkit.missing() is not None:
        sys.exit(f"python -m ptx needs {toolkit.missing()}")
    chosen = arguments.ops if arguments.what == "report" else None
    makers = [make for make in cases.CASES if chosen is None or make.op in chosen]
    counted = [counting.count(make()) for make in makers]
    if arguments.what == "baseline":
        costs.save(toolkit.nvcc_version(), counted)
    else:
        print(f"nvcc {toolkit.nvcc_version()}; counted, not measured\n")
        print(*table(counted), sep="\n")


main()
