"""The table of modes: what it says of runs that are too short for it."""

import dataclasses

import numpy as np
import pytest
from rich.console import Console

from dlrm import report
from dlrm.loop import Run

RUN = Run(0, 0.7, 0.5, None, *4 * [np.ones(300)], "", [], {}, {})


def _shorter(steps):
    arrays = ("loss", "step_ms", "wire_bytes", "wire_bytes_max")
    return dataclasses.replace(RUN, **{name: getattr(RUN, name)[:steps] for name in arrays})


@pytest.mark.parametrize(
    "steps, line", [(62, "62 steps: too short to judge quality"), (299, "299 steps: "), (300, None)]
)
def test_runs_too_short_to_judge_quality_by_say_so(capsys, steps, line):
    report.print_table(Console(width=100), {"dense": [RUN], "dct": [RUN, _shorter(steps)]}, None)
    said = [line for line in capsys.readouterr().out.splitlines() if "steps" in line]
    assert len(said) == (line is not None)
    assert line is None or said[0].startswith(line)
