"""The tables of docs/kernels.md: what calls cost, and what that comes to on a GPU."""

from collections.abc import Iterable, Iterator

from .cases import Case
from .costs import LANES, SECTOR, Cost
from .roofline import GPUS, time

COSTS = (
    "call",
    "must move",
    "moves",
    "asks for",
    "issue slots",
    "half rate",
    "PTX",
    "active",
    "conflicts",
    "trips",
    "loads",
    "blocks",
    "most of it",
)
TIMES = (
    "call",
    "elements",
    *(f"memory, {gpu.name}" for gpu in GPUS),
    "issue",
    "half rate",
    "latency",
    "launches",
    *(f"of copy, {gpu.name}" for gpu in GPUS),
    "bound by",
)


def lines(counted: Iterable[tuple[Case, Cost]]) -> Iterator[str]:
    """Both tables, in markdown."""
    counted = list(counted)
    yield from _table(COSTS, (_costs(cost) for _, cost in counted))
    yield ""
    yield from _table(TIMES, (row for case, cost in counted for row in _times(case, cost)))


def _table(columns: tuple[str, ...], rows: Iterable[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _costs(cost: Cost) -> list[str]:
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
        f"{sum_of('trips'):.1f}",
        ", ".join(str(kernel.in_flight) for kernel in cost.kernels),
        ", ".join(str(kernel.resident) for kernel in cost.kernels),
        ", ".join(f"{name} {100 * classes[name] / ptx:.0f} %" for name in most),
    ]


def _times(case: Case, cost: Cost) -> Iterator[list[str]]:
    for elements in case.sizes:
        times = [time(cost, elements, gpu) for gpu in GPUS]
        first = times[0]
        yield [
            cost.name,
            f"{elements:,}",
            *(_microseconds(t.memory) for t in times),
            _microseconds(first.issue),
            _microseconds(first.half_rate),
            _microseconds(first.latency),
            _microseconds(first.launches),
            *(f"{t.of_copy:.2f}" for t in times),
            ", ".join(dict.fromkeys(t.bound for t in times)),
        ]


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f}"
