"""What an op launches on CUDA, as docs/design/kernels.md states it.

Checked in tests/ptx/test_launches.py.
"""

import re
from pathlib import Path
from typing import NamedTuple

_ROW = re.compile(r"^\| (?P<ops>`[^|]*) \|.*\| (?P<memset>memset, )?(?P<kernels>\d+) kernels? \|$")


class Launches(NamedTuple):
    """How often the GPU is asked to do something."""

    kernels: int
    memsets: int


def stated() -> dict[str, Launches]:
    """{op: what one call launches}."""
    launches: dict[str, Launches] = {}
    for line in (
        (Path(__file__).parents[1] / "docs" / "design" / "kernels.md").read_text().splitlines()
    ):
        if row := _ROW.match(line):
            found = Launches(int(row["kernels"]), int(row["memset"] is not None))
            for op in re.findall(r"`(\w+)`", row["ops"]):
                assert launches.setdefault(op, found) == found, op
    return launches
