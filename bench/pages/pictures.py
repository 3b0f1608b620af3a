"""docs/images: what README.md shows, for light and for dark pages."""

import re
from collections.abc import Mapping
from pathlib import Path

import matplotlib

from dlrm import files
from network.plots import step_times

from .experiments import Experiment
from .render import ROOT

IMAGES = ROOT / "docs" / "images"
INK = {"light": "#1f2328", "dark": "#e6edf3"}  # of GitHub's text
COLOURED = ("text.color", "axes.edgecolor", "ytick.color", "axes.titlecolor")


SHOWN = ("dense", "bf16", "powersgd1", "dct", "dct-int4", "local-ternary")


def draw(experiments: Mapping[str, Experiment], folder: Path = IMAGES) -> None:
    """A step's time at two rates, on no background; the same bytes from the same results."""
    (run,) = experiments["link_few_bits"].runs
    cells = [cell for cell in run["cells"] if cell["mode"] in SHOWN]
    for name, ink in INK.items():
        style = dict.fromkeys(COLOURED, ink) | {"font.size": 12, "svg.hashsalt": "dct"}
        with matplotlib.rc_context(style):
            figure = step_times({**run, "cells": cells})
            path, options = folder / f"step_time-{name}.svg", {"metadata": {"Date": None}}
            files.write_figure(path, figure, transparent=True, **options)
    files.write(folder / "badges.svg", badges().encode())


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
