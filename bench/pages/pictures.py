"""docs/images: what README.md shows, for light and for dark pages."""

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


def draw(experiments: Mapping[str, Experiment], folder: Path = IMAGES) -> None:
    """The headline's step time, on no background; the same bytes from the same results."""
    (run,) = experiments["link_one_threshold"].runs
    for name, ink in INK.items():
        style = dict.fromkeys(COLOURED, ink) | {"font.size": 12, "svg.hashsalt": "dct"}
        with matplotlib.rc_context(style):
            figure = step_times(run["cells"])
            path, options = folder / f"step_time-{name}.svg", {"metadata": {"Date": None}}
            files.write_figure(path, figure, transparent=True, **options)
