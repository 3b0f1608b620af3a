"""docs/images: what README.md and the guide show, for light and for dark pages."""

import re
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dlrm import files
from network.plots import step_times

from . import trained
from .experiments import Experiment
from .figures import on_python
from .render import ROOT

IMAGES = ROOT / "docs" / "images"
INK = {"light": "#1f2328", "dark": "#e6edf3"}  # of GitHub's text
COLOURED = ("text.color", "axes.edgecolor", "ytick.color", "axes.titlecolor")
COLOURED += ("xtick.color", "axes.labelcolor")


SHOWN = ("dense", "bf16", "powersgd1", "dct", "dct-int4", "local-ternary")


def draw(experiments: Mapping[str, Experiment], folder: Path = IMAGES) -> None:
    """On no background; the same bytes from the same results."""
    (run,) = experiments["link_few_bits"].runs
    cells = [cell for cell in run["cells"] if cell["mode"] in SHOWN]
    for name, ink in INK.items():
        style = dict.fromkeys(COLOURED, ink) | {"font.size": 12, "svg.hashsalt": "dct"}
        with matplotlib.rc_context(style):
            pictures = {"step_time": step_times({**run, "cells": cells})}
            pictures["loss_by_steps"] = loss_by_steps(experiments)
            pictures["loss_by_bytes"] = loss_by_bytes(experiments)
            pictures["loss_by_density"] = loss_by_density(experiments)
            for picture, figure in pictures.items():
                path, options = folder / f"{picture}-{name}.svg", {"metadata": {"Date": None}}
                files.write_figure(path, figure, transparent=True, **options)
    files.write(folder / "badges.svg", badges().encode())


RANKS = (2, 4)


def two_panels(height: float, below: str) -> tuple[Figure, np.ndarray]:
    """For the loss over float32's: a panel for each number of ranks, stacked to fit on a phone."""
    figure = Figure(figsize=(6, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, ranks in zip(panels, RANKS, strict=True):
        prepare(axes)
        axes.set_title(f"{ranks} ranks")
        axes.set_ylabel("loss over float32's")
    panels[-1].set_xlabel(below)
    return figure, panels


def prepare(axes: Axes) -> None:
    """A line at 0, and a logarithmic scale below."""
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.axhline(0, linewidth=0.8, color=matplotlib.rcParams["axes.edgecolor"])
    axes.spines[["top", "right"]].set_visible(False)


PARTS = {300: "-short", 600: "", 1200: "-more", 3000: "-long"}
LINES = {
    "local-float32:100%x10": ("averaged in float32", "#9e9e9e", "--"),
    "local-ternary:100%x10": ("averaged in ternary", "#bf360c", "-"),
    "int4": ("hook, int4", "#1e88e5", "-"),
}


def loss_by_steps(experiments: Mapping[str, Experiment]) -> Figure:
    """Loss over float32's against the steps of a run, for two numbers of ranks."""
    parts = {part.name for part in experiments["text_python"].parts}
    figure, panels = two_panels(6, "steps of the run")
    for axes, ranks in zip(panels, RANKS, strict=True):
        of_steps = {
            steps: on_python(experiments, f"ranks-{ranks}{suffix}")
            for steps, suffix in PARTS.items()
            if f"ranks-{ranks}{suffix}" in parts
        }
        for name, (label, colour, line) in LINES.items():
            points = []
            for steps, methods in of_steps.items():
                if name in methods:
                    over = trained.over(methods[name], trained.baseline(methods))
                    points.append((steps, sum(over) / len(over), min(over), max(over)))
            steps, mean, least, most = zip(*points, strict=True)
            spread = [np.subtract(mean, least), np.subtract(most, mean)]
            style = {"color": colour, "linestyle": line, "marker": "o", "capsize": 3}
            axes.errorbar(steps, mean, spread, label=label, **style)
        axes.set_xticks(list(of_steps), [f"{steps:,}" for steps in of_steps])
    style = {"ncols": 2, "frameon": False, "handlelength": 1.6}
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", **style)
    return figure


METHODS = {
    "bf16": ("bfloat16", "#9e9e9e"),
    "int4": ("int4", "#1e88e5"),
    "ternary": ("ternary", "#8e24aa"),
    "local-float32:100%x10": ("float32, every 10", "#43a047"),
    "local-ternary:100%x3": ("ternary, every 3", "#ffb300"),
    "local-ternary:100%x6,spaced=root": ("ternary, every 6, spaced", "#fb8c00"),
    "local-ternary:100%x10": ("ternary, every 10", "#bf360c"),
}


def loss_by_bytes(experiments: Mapping[str, Experiment]) -> Figure:
    """Loss over float32's against how many times fewer bytes, for two numbers of ranks."""
    figure, panels = two_panels(6.8, "fewer bytes by")
    for axes, ranks in zip(panels, RANKS, strict=True):
        for steps, marker in ((600, "o"), (3000, "D")):
            methods = on_python(experiments, f"ranks-{ranks}{PARTS[steps]}")
            dense = trained.baseline(methods)
            for name in (name for name in METHODS if name in methods):
                label, colour = METHODS[name]
                over = trained.over(methods[name], dense)
                times = dense[0]["bytes_per_step"] / methods[name][0]["bytes_per_step"]
                mean = sum(over) / len(over)
                spread = [[mean - min(over)], [max(over) - mean]]
                style = {"color": colour, "capsize": 3, "label": label if steps == 600 else None}
                style["markerfacecolor"] = "none" if steps == 600 else colour
                axes.errorbar(times, mean, spread, fmt=marker, **style)
        axes.set_xlim(1.5, 300)
        axes.set_xticks([2, 10, 50, 200], ["2x", "10x", "50x", "200x"])
    style = {"ncols": 2, "frameon": False, "handlelength": 1}
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", **style)
    return figure


OPTIMIZERS = {
    "clicks-sgd": ("SGD", "#1e88e5", "o"),
    "clicks-momentum": ("SGD with momentum", "#bf360c", "s"),
}


def loss_by_density(experiments: Mapping[str, Experiment]) -> Figure:
    """Log loss over float32's against the hook's density, for two optimizers of a click model."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    prepare(axes)
    axes.set_xlabel("density")
    for part, (label, colour, marker) in OPTIMIZERS.items():
        methods = trained.best(experiments["neighbours"].of_part(part))
        points = []
        for name, runs in methods.items():
            if name.startswith("dct:"):
                over = trained.over(runs, trained.baseline(methods))
                density = float(name.removeprefix("dct:").removesuffix("%"))
                points.append((density, sum(over) / len(over), min(over), max(over)))
        density, mean, least, most = zip(*sorted(points), strict=True)
        spread = [np.subtract(mean, least), np.subtract(most, mean)]
        axes.errorbar(density, mean, spread, label=label, color=colour, marker=marker, capsize=3)
    axes.set_xticks(ticks := (5, 2, 1, 0.5, 0.2, 0.1, 0.05), [f"{tick:g} %" for tick in ticks])
    axes.invert_xaxis()
    axes.set_ylabel("log loss over float32's")
    axes.legend(frameon=False)
    return figure


def badges() -> str:
    """Version, licence, Python and torch, as pyproject.toml has them; asks no other host."""
    project = (ROOT / "pyproject.toml").read_text()

    def found(pattern: str) -> str:
        return re.search(pattern, project)[1]

    pairs = [
        ("version", found(r'\nversion = "(.*)"')),
        ("licence", "BSD-3-Clause"),
        ("Python", found(r'requires-python = ">=(.*)"') + " or later"),
        ("torch", found(r'"torch>=(.*?)"') + " or later"),
    ]
    x, parts = 0, []
    for name, value in pairs:
        left, right = (round(6.6 * len(text)) + 14 for text in (name, value))
        parts += [
            f'<rect x="{x}" width="{left + right}" height="20" rx="3" fill="#455a64"/>',
            f'<rect x="{x + left}" width="{right}" height="20" rx="3" fill="#bf360c"/>',
            f'<text x="{x + left / 2}" y="14">{name}</text>',
            f'<text x="{x + left + right / 2}" y="14">{value}</text>',
        ]
        x += left + right + 6
    size = f'width="{x}" height="20" viewBox="0 0 {x} 20"'
    style = 'fill="#fff" text-anchor="middle" font-family="Verdana,sans-serif" font-size="11"'
    inside = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<g {style}>\n{inside}\n</g></svg>\n'
