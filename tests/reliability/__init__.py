"""Thousands of random cases. Run them in tests/ with `python -m reliability PART`.

A part is a module in this package that defines

    COUNTS: dict[str, int]   the default number of cases per entry point, in order of execution
    BATCH: int               cases per call of `run`
    run(entry_point, first, count, seed)
        -> {"failures": [{"case": 7, "what": "..."}, ...], "name": 3, ...}

`run` runs the cases first .. first + count - 1. The seed and the case's number determine the case.
Other values in the result are counts, which are added up over all calls. If a name begins with
"max_", only the maximum of its values is kept.

`make test` runs a thousandth of COUNTS, but at least one case, for the entry points in QUICK (by
default all). `pytest -m large` runs a hundredth for all entry points.
"""

import importlib
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PARTS = ("fuzz", "patches", "programs")


def part(name: str) -> ModuleType:
    """Import the module of one part, and no other."""
    return importlib.import_module(f"reliability.{name}")
