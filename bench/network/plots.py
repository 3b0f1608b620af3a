"""step_time.png of bench/link.py: how long a step takes, and where the time goes."""

import math

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rates import describe_rate

from .phases import PHASES
from .report import label

# Okabe and Ito's, which colour-blind readers can tell apart.
COLOURS = dict(zip(PHASES, ("#999999", "#e69f00", "#0072b2", "#009e73"), strict=True))


def step_times(run: dict) -> Figure:
    """A panel for each rank count and rate: a bar per mode, stacked by phase, with its median.

    Rates stand side by side; with one rank count one below the other, which fits on a phone.
    """
    measured = [cell for cell in run["cells"] if cell["step_ms"]]
    counts = list(dict.fromkeys(cell["ranks"] for cell in measured))
    rates = sorted({cell["rate"] for cell in measured}, key=lambda rate: rate or math.inf)
    modes = list(dict.fromkeys(cell["mode"] for cell in measured))
    rows, columns = (len(counts), len(rates)) if len(counts) > 1 else (len(rates), 1)
    size = (1.7 + 4.3 * columns, 0.4 + rows * (0.5 + 0.3 * len(modes)))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for row, ranks in zip(grid.reshape(len(counts), len(rates)), counts, strict=True):
        for axes, rate in zip(row, rates, strict=True):
            bars = [cell for cell in measured if (cell["ranks"], cell["rate"]) == (ranks, rate)]
            names = [label(run, cell["mode"]) for cell in bars]
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
    style = {"ncols": 4, "frameon": False, "handlelength": 1, "columnspacing": 1.2}
    figure.legend(handles, labels, loc="outside lower center", **style)
    return figure
