"""Files that are torn, another's, or do not fit on the disk.

A saved file is cut off at every 4 kB and at its last byte (further cases: at random), and read
while a run is under way; files of another run, rank, model and setting are read; files are written
under a limit of their size, at every 4 kB up to 96, each twice. Each raises, and every bit is as it
was: of the state, and of the file that was there before. The run goes on like one that was left
alone. What is of another run raises in the next step, and there bits are not compared.
"""

import tempfile
from pathlib import Path
from typing import Any

from ranks import run_ranks

from . import own_files, states

# Doors of states, by torch.save and by torch.distributed.checkpoint; what merges states; the click
# model's checkpoint; the experiments' files. Each has as many cases as its files have places.
SAVED = {
    **{door: (states.torn, door, "torch.save", 2) for door in states.DOORS},
    **{f"{door}, DCP": (states.torn, door, "DCP", 2) for door in states.DOORS},
    **{f"{door}, merged": (states.torn, door, "merged", 2) for door in ("DDP", "FSDP2")},
    "click model": (own_files.torn, 1),
    "experiments": (own_files.torn_runs, 1),
    "full disk": (own_files.full, 1),
    **{f"{door}, another's": (states.foreign, door, 2) for door in states.DOORS},
}
COUNTS = {
    **{"DDP": 50, "averager": 90, "FSDP2": 50},
    **{"DDP, DCP": 100, "averager, DCP": 190, "FSDP2, DCP": 120},
    **{"DDP, merged": 100, "FSDP2, merged": 120},
    **dict.fromkeys(("click model", "experiments", "full disk"), 50),
    **{f"{door}, another's": len(states.FOREIGN) for door in states.DOORS},
}
BATCH = 200
QUICK = ("click model", "full disk")


def run(door: str, first: int, count: int, seed: int) -> dict[str, Any]:
    function, *arguments, ranks = SAVED[door]
    cases = range(first, first + count)
    with tempfile.TemporaryDirectory() as folder:
        given = (*arguments, Path(folder), cases, seed)
        found = run_ranks(function, ranks, *given, timeout=1200)
    failures = [failure for of_rank in found for failure in of_rank["failures"]]
    places = found[0].get("max_places", 0)
    assert places <= COUNTS[door], f"{door}: COUNTS must be {places} or more"
    return found[0] | {"failures": failures}
