"""The launches of each op on CUDA, as stated in docs/design/kernels.md.

tools/ptx/tests/test_launches.py compares the stated launches with the actual launches.
"""

import re
from pathlib import Path

from ptx.backend import Launches

PAGE = Path(__file__).parents[2] / "docs" / "design" / "kernels.md"
_ROW = re.compile(r"^\| (?P<ops>`[^|]*) \|.*\| (?P<memset>memset, )?(?P<kernels>\d+) kernels? \|$")


def stated() -> dict[str, Launches]:
    """{op: launches per call}."""
    launches: dict[str, Launches] = {}
    for line in PAGE.read_text().splitlines():
        if row := _ROW.match(line):
            found = Launches(int(row["kernels"]), int(row["memset"] is not None))
            for op in re.findall(r"`(\w+)`", row["ops"]):
                assert launches.setdefault(op, found) == found, op
    return launches
