"""step_time.png of bench/link.py: how long a step takes, and where the time goes."""

import math

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rates import describe_rate

from .methods import METHODS
from .phases import PHASES

# Okabe and Ito's, which colour-blind readers can tell apart.
COLOURS = dict(zip(PHASES, ("#999999", "#e69f00", "#0072b2", "#009e73"), strict=True))


def step_times(cells: list[dict]) -> Figure:
    """A panel for each rank count and rate: a bar per mode, stacked by phase, with its median."""
    measured = [cell for cell in cells if cell["step_ms"]]
    counts = list(dict.fromkeys(cell["ranks"] for cell in measured))
    rates = sorted({cell["rate"] for cell in measured}, key=lambda rate: rate or math.inf)
    modes = list(dict.fromkeys(cell["mode"] for cell in measured))
    size = (1.7 + 4 * len(rates), len(counts) * (1.1 + 0.32 * len(modes)))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(counts), len(rates), squeeze=False, sharey=True)
    for row, ranks in zip(grid, counts, strict=True):
        for axes, rate in zip(row, rates, strict=True):
            bars = [cell for cell in measured if (cell["ranks"], cell["rate"]) == (ranks, rate)]
            names = [METHODS[cell["mode"]].title for cell in bars]
            left = np.zeros(len(bars))
            for phase, colour in COLOURS.items():
                ms = np.array([cell["phases_ms"][phase] for cell in bars])
                axes.barh(names, ms, left=left, color=colour, label=phase)
                left += ms
            for name, end, cell in zip(names, left, bars, strict=True):
                axes.text(end, name, f" {cell['step_ms'][1]:.0f} ms", va="center")
            axes.set_title(f"{ranks} ranks, {describe_rate(rate)}")
            axes.margins(x=0.25)
            axes.spines[["top", "right", "bottom"]].set_visible(False)
            axes.tick_params(length=0)
            axes.set_xticks([])
    grid[0][0].invert_yaxis()  # the first mode on top, in all that share the axis
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure
