"""Tables and plots of `dct-bench scale`."""

import math
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..link.methods import METHODS as MODES
from ..rates import describe_rate
from .break_even import FASTER, GRID
from .cost_model import LOCAL_FORMAT, LOCAL_PERIOD, OURS, Step, union_density
from .validation import Point, median_error

Steps = dict[tuple[int, float], dict[str, Step]]  # by ranks and rate, then by method
TITLES = {
    "dense": "dense float32",
    "bf16": "bf16",
    "powersgd1": "PowerSGD, rank 1",
    "powersgd2": "PowerSGD, rank 2",
    "dct": "DCT, all-gather",
    "dct-reduce-scatter": "DCT, reduce-scatter",
    "local": f"local steps, {LOCAL_FORMAT}, every {LOCAL_PERIOD}",
}
_SHORT = {
    "powersgd1": "PowerSGD 1",
    "powersgd2": "PowerSGD 2",
    "dct": "all-gather",
    "dct-reduce-scatter": "reduce-scatter",
    "local": "local",
}
_SHORT |= {"dense": "dense", "bf16": "bf16"}
_SPARSE_ENTRY, _BF16 = 4, 2  # bytes: a position and a value; a value


def print_sources(console: Console, sources: dict[str, str]) -> None:
    """What the predictions rest on."""
    for name, source in sources.items():
        console.print(f"{name}: {source}", markup=False, highlight=False, soft_wrap=True)


def print_winners(console: Console, steps: Steps) -> None:
    """Ranks by rates: the fastest method, and by how much it beats the best of the other side."""
    rates = list(dict.fromkeys(rate for _, rate in steps))
    ours = ", ".join(_SHORT[method] for method in OURS)
    title = f"Fastest method ({ours}: DCT's), and DCT's speed over the best other"
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
        table.add_column(f"against {TITLES[other]}", justify="right", no_wrap=True)
    for ranks in dict.fromkeys(row["ranks"] for row in even):
        for method in OURS:
            of = {r["against"]: r for r in even if (r["ranks"], r["method"]) == (ranks, method)}
            pays = (_ranges(of[other]["pays"]) for other in others)
            table.add_row(f"{ranks:,}", _SHORT[method], *pays)
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
            TITLES.get(point.mode, MODES[point.mode].title),
            f"{point.measured:.1f}",
            f"{point.predicted:.1f}",
            f"{100 * point.error:+.0f} %{note}",
        )
    console.print(table)
    share = 100 * median_error(points)
    text = f"median error of the points that do not calibrate: {share:.0f} %"
    console.print(text, markup=False, highlight=False)


def plot_step_times(path: Path, steps: Steps, title: str) -> None:
    """A panel per rate: step time over ranks, a line per method."""
    rates = list(dict.fromkeys(rate for _, rate in steps))
    counts = list(dict.fromkeys(ranks for ranks, _ in steps))
    columns = min(3, len(rates))
    rows = math.ceil(len(rates) / columns)
    figure = _figure(4.5 * columns, 3.6 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(rates) :]:
        axes.set_visible(False)
    for axes, rate in zip(panels, rates, strict=False):
        for method in steps[counts[0], rate]:
            times = [1e3 * steps[ranks, rate][method].seconds for ranks in counts]
            style = "-" if method in OURS else "--"
            axes.plot(counts, times, style, marker=".", label=TITLES[method])
        axes.set(title=describe_rate(rate), xlabel="ranks", ylabel="ms per step (predicted)")
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [f"{ranks:,}" for ranks in counts])
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def plot_break_even(
    path: Path, faster: dict[str, dict[tuple[int, float], float]], title: str
) -> None:
    """A map per opponent: how many times as fast DCT's best way is; a line where it begins to pay.

    Args:
        faster: {opponent: {(ranks, rate): ratio}}, on a grid.
    """
    figure = _figure(5.5 * len(faster), 4.5)
    panels = figure.subplots(1, len(faster), squeeze=False)[0]
    levels = 2.0 ** np.arange(-3, 3.1, 0.25)
    for axes, (opponent, ratios) in zip(panels, faster.items(), strict=True):
        counts, rates = (sorted(set(values)) for values in zip(*ratios, strict=True))
        grid = np.array([[ratios[ranks, rate] for ranks in counts] for rate in rates])
        grid = grid.clip(levels[0], levels[-1])
        where = (counts, np.array(rates) / 1e9, grid)
        norm = LogNorm(levels[0], levels[-1])
        shades = axes.contourf(*where, levels=levels, cmap="RdBu", norm=norm)
        if grid.min() < FASTER < grid.max():
            axes.contour(*where, levels=[FASTER], colors="black")
        axes.set(title=f"against {opponent}", xlabel="ranks", ylabel="Gbit/s")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    bar = figure.colorbar(shades, ax=list(panels), ticks=[1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8])
    bar.ax.set_yticklabels(["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    bar.set_label(f"DCT is so many times as fast (predicted; line: {FASTER})")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _winner(of_methods: dict[str, Step]) -> str:
    def best(methods: list[str]) -> tuple[str, float]:
        return min(((m, of_methods[m].seconds) for m in methods), key=lambda pair: pair[1])

    ours, seconds = best([m for m in of_methods if m in OURS])
    theirs, other = best([m for m in of_methods if m not in OURS])
    if 1 / FASTER < other / seconds < FASTER:
        return "as fast"
    winner = ours if seconds <= other else theirs
    return f"{_SHORT[winner]} {other / seconds:.2f}x"


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


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
