"""Thousands of random cases: `python -m reliability PART`, in tests/.

A part is a module here, with

    COUNTS: dict[str, int]   the default number of cases per entry point, in the order of running
    BATCH: int               cases per call of `run`
    run(door, first, count, seed) -> {"failures": [{"case": 7, "what": "..."}, ...], "name": 3, ...}

`run` runs the cases first .. first + count - 1. Each case is determined by the seed and its number.
Other names in the result are counts, which are added up over the calls; of "max_..." the largest
is kept.

`make test` runs a thousandth of each part, at least one case, at the entry points in QUICK (all of
them by default). `-m large` runs a hundredth of everything.
"""

import importlib
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PARTS = ("fuzz", "programs")


def part(name: str) -> ModuleType:
    """Imports the module of a part, and no other part."""
    return importlib.import_module(f"reliability.{name}")
