"""step_time.png and phases.png of `dct-bench link`."""

import math
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from ..rates import describe_rate
from .cells import Cell
from .methods import METHODS
from .phases import PHASES


def step_times(path: Path, cells: list[Cell]) -> None:
    """A panel per rank count: median step time over rates, a line per mode, 20-80 % shaded."""
    groups = _by_ranks(cells)
    figure = _figure(6.5 * len(groups), 4.5)
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, (ranks, of_ranks) in zip(panels, groups.items(), strict=True):
        rates = _rates(of_ranks)
        for number, mode in enumerate(dict.fromkeys(cell.mode for cell in of_ranks)):
            of_mode = {cell.rate: cell.step_ms for cell in of_ranks if cell.mode == mode}
            places = [place for place, rate in enumerate(rates) if of_mode.get(rate)]
            low, median, high = np.transpose([of_mode[rates[place]] for place in places])
            axes.plot(places, median, marker="o", color=f"C{number}", label=METHODS[mode].title)
            axes.fill_between(places, low, high, color=f"C{number}", alpha=0.15)
        axes.set(title=f"{ranks} ranks", ylabel="ms per step", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(range(len(rates)), [describe_rate(rate) for rate in rates])
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def phases(path: Path, cells: list[Cell]) -> None:
    """A panel per rank count and rate: a bar per mode, stacked by where the time goes."""
    groups = _by_ranks(cells)
    columns = max(len(_rates(of_ranks)) for of_ranks in groups.values())
    figure = _figure(4 * columns, 3.6 * len(groups))
    grid = figure.subplots(len(groups), columns, squeeze=False)
    for row, (ranks, of_ranks) in zip(grid, groups.items(), strict=True):
        for axes in row:
            axes.set_visible(False)
        for axes, rate in zip(row, _rates(of_ranks), strict=False):
            axes.set_visible(True)
            bars = [cell for cell in of_ranks if cell.rate == rate]
            names = [METHODS[cell.mode].title for cell in bars]
            bottom = np.zeros(len(bars))
            for phase in PHASES:
                ms = np.array([cell.phases_ms[phase] for cell in bars])
                axes.bar(names, ms, bottom=bottom, label=phase)
                bottom += ms
            axes.set(title=f"{ranks} ranks, {describe_rate(rate)}", ylabel="ms per step")
            axes.tick_params("x", rotation=40, labelsize="small")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _by_ranks(cells: list[Cell]) -> dict[int, list[Cell]]:
    measured = [cell for cell in cells if cell.step_ms is not None]
    counts = dict.fromkeys(cell.ranks for cell in measured)
    return {ranks: [cell for cell in measured if cell.ranks == ranks] for ranks in counts}


def _rates(cells: list[Cell]) -> list[float | None]:
    rates = {cell.rate for cell in cells}
    return sorted(rates, key=lambda rate: math.inf if rate is None else rate)
