"""The bar of a run shows a loss once there is one, and never nan."""

import io
import re

from rich.console import Console

from dlrm.progress import bar


def _shown(*losses):
    """What the bar showed before the first loss, and after the last one."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    with bar(console, "seed 0", 3) as on_step:
        for loss in losses:
            on_step(loss)
    return console.file.getvalue()


def test_no_loss_is_shown_before_the_first_step():
    shown = _shown()
    assert "seed 0" in shown and "loss" not in shown


def test_a_loss_that_is_not_finite_is_said_and_not_averaged():
    nan = float("nan")
    assert re.findall("loss (.*)", _shown(0.5, nan)) == ["not finite"]
    assert re.findall("loss (.*)", _shown(0.5, nan, 0.5)) == ["0.5000"]


def test_ranks_without_a_terminal_draw_nothing():
    console = Console(file=io.StringIO())
    with bar(console, "seed 0", 1) as on_step:
        on_step(0.5)
    assert console.file.getvalue() == ""
