"""Tables of bench/scale.py."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from network.methods import METHODS as MODES
from rates import describe_rate

from .break_even import FASTER, GRID
from .cost_model import Step, union_density
from .methods import METHODS, OURS
from .validation import Point, median_error

Steps = dict[tuple[int, float], dict[str, Step]]  # by ranks and rate, then by method
_SPARSE_ENTRY, _BF16 = 4, 2  # bytes: a position and a value; a value


def print_sources(console: Console, sources: dict[str, str]) -> None:
    """What the predictions rest on."""
    for name, source in sources.items():
        console.print(f"{name}: {source}", markup=False, highlight=False, soft_wrap=True)


def print_winners(console: Console, steps: Steps) -> None:
    """Ranks by rates: the fastest method, and by how much it beats the best of the other side."""
    rates = list(dict.fromkeys(rate for _, rate in steps))
    title = "Fastest method, and DCT's speed over the best of dense, bf16 and PowerSGD"
    table = new_table(title, "ranks")
    for rate in rates:
        table.add_column(describe_rate(rate), justify="right", no_wrap=True)
    for ranks in dict.fromkeys(ranks for ranks, _ in steps):
        table.add_row(f"{ranks:,}", *(_winner(steps[ranks, rate]) for rate in rates))
    table.caption = "as fast: less than 5 % apart, take the simplest; below 1x, what is named"
    console.print(table)


def print_break_even(console: Console, even: list[dict]) -> None:
    """At which rates DCT is faster than each other method."""
    others = list(dict.fromkeys(row["against"] for row in even))
    title = f"Rates (Gbit/s) at which DCT pays: it is {FASTER}x as fast, or faster"
    table = new_table(title, "ranks", "way")
    for other in others:
        table.add_column(f"against {METHODS[other].short}", justify="right", no_wrap=True)
    for ranks in dict.fromkeys(row["ranks"] for row in even):
        for method in dict.fromkeys(row["method"] for row in even):
            of = {r["against"]: r for r in even if (r["ranks"], r["method"]) == (ranks, method)}
            pays = (_ranges(of[other]["pays"]) for other in others)
            table.add_row(f"{ranks:,}", METHODS[method].short, *pays)
    console.print(table)


def print_union(console: Console, density: float, counts: list[int]) -> None:
    """How the sum of sparse tensors fills up, if nobody thresholds it again."""
    title = "A sum of P sparse gradients, masks independent, not thresholded again"
    table = new_table(title, "ranks", "density of the sum", "its bytes over bf16's")
    for ranks in counts:
        union = union_density(density, ranks)
        share = union * _SPARSE_ENTRY / _BF16
        table.add_row(f"{ranks:,}", f"{100 * union:.2f} %", f"{share:.2f}")
    table.caption = "above 1 a sparse sum costs more than a dense one: shard thresholds its sums"
    console.print(table)


def print_validation(console: Console, points: list[Point]) -> None:
    """Predicted beside measured, and the median error."""
    table = new_table("Predicted and measured step times", "ranks", "rate", "mode")
    for heading in ("measured ms", "predicted ms", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        note = " (calibrates)" if point.calibrating else ""
        table.add_row(
            str(point.ranks),
            describe_rate(point.rate),
            MODES[point.mode].title,
            f"{point.measured:.1f}",
            f"{point.predicted:.1f}",
            f"{100 * point.error:+.0f} %{note}",
        )
    console.print(table)
    share = 100 * median_error(points)
    text = f"median error of the points that do not calibrate: {share:.0f} %"
    console.print(text, markup=False, highlight=False)


def _winner(of_methods: dict[str, Step]) -> str:
    def best(methods: list[str]) -> tuple[str, float]:
        return min(((m, of_methods[m].seconds) for m in methods), key=lambda pair: pair[1])

    ours, seconds = best([m for m in of_methods if m in OURS])
    theirs, other = best([m for m in of_methods if m not in OURS])
    if 1 / FASTER < other / seconds < FASTER:
        return "as fast"
    winner = ours if seconds <= other else theirs
    return f"{METHODS[winner].short} {other / seconds:.2f}x"


def _ranges(pays: list[tuple[float, float]]) -> str:
    def one(low: float, high: float) -> str:
        if high == GRID[-1]:
            return "any" if low == GRID[0] else f"from {low / 1e9:.3g}"
        return f"up to {high / 1e9:.3g}" if low == GRID[0] else f"{low / 1e9:.3g}-{high / 1e9:.3g}"

    return ", ".join(one(*of) for of in pays) or "none"


def new_table(title: str, *headings: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table
