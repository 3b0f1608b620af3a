"""Faults by the thousand: `python -m reliability PART`, in tests/.

A part is a module here, with

    COUNTS: dict[str, int]   cases asked for at each door, in the order of running
    BATCH: int               cases in a call of `run`
    run(door, first, count, seed) -> {"failures": [{"case": 7, "what": "..."}, ...], "name": 3, ...}

`run` runs the cases first .. first + count - 1, each of which follows from the seed and its number.
Other names that it gives are integers, which add up over the calls; of "max_..." the largest stays.
A part's docstring begins with its title, a line, and then says what it checks, in a paragraph.

`make test` runs a thousandth of each part, at least a case, at the doors that the part names as
QUICK, by default all. `-m large` runs a hundredth of everything.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT / "examples"), str(ROOT / "bench")]  # what is there is in no package
sys.path += PATHS
PARTS = ("kills", "fuzz", "programs", "soak", "sizes", "files")


def part(name: str) -> ModuleType:
    """The module of a part; imports nothing of the others."""
    return importlib.import_module(f"reliability.{name}")
