"""A table of what calls cost."""

from collections.abc import Iterable, Iterator

from .costs import LANES, SECTOR, Cost

COLUMNS = ("call", "must move", "moves", "asks for", "issue slots", "half rate", "PTX")
COLUMNS += ("active", "conflicts", "loads", "blocks", "most of it")


def lines(counted: Iterable[Cost]) -> Iterator[str]:
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
        ", ".join(str(kernel.in_flight) for kernel in cost.kernels),
        ", ".join(str(kernel.resident) for kernel in cost.kernels),
        ", ".join(f"{name} {100 * classes[name] / ptx:.0f} %" for name in most),
    ]
