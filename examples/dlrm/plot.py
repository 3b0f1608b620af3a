"""curves.png: training loss and bytes sent, over steps."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from . import files
from .report import Runs

SMOOTHED_STEPS = 100  # at most; a tenth of a short run


def write_curves(folder: Path, runs: Runs) -> None:
    """Two panels: training loss, smoothed, with a thin line per seed; cumulative bytes."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, bytes_axes = figure.subplots(1, 2)
    for number, (mode, of_mode) in enumerate(runs.items()):
        color = f"C{number}"
        curves = [_smoothed(run.loss) for run in of_mode]
        for steps, curve in curves:
            loss_axes.plot(steps, curve, color=color, linewidth=0.5, alpha=0.6)
        steps = curves[0][0]
        loss_axes.plot(steps, np.mean([c for _, c in curves], axis=0), color=color, label=mode)
        sent = np.mean([run.wire_bytes for run in of_mode], axis=0).cumsum()
        bytes_axes.plot(np.arange(1, len(sent) + 1), sent, color=color, label=mode)
    loss_axes.set(xlabel="step", ylabel="training loss")
    bytes_axes.set(xlabel="step", ylabel="bytes sent per rank, cumulative")
    if all(run.wire_bytes.any() for of_mode in runs.values() for run in of_mode):
        bytes_axes.set_yscale("log")
    for axes in (loss_axes, bytes_axes):
        axes.grid(alpha=0.3)
        axes.legend()
    files.write_figure(folder / "curves.png", figure, dpi=120)


def _smoothed(loss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Moving mean: (the last step of each window, mean)."""
    width = min(SMOOTHED_STEPS, 1 + len(loss) // 10)
    return np.arange(width, len(loss) + 1), np.convolve(loss, np.ones(width) / width, "valid")
