"""Adds to environment.json how fast the GPU ran in every stage.

python bench/gpu/clocks.py OUT

Of clocks.csv, which nvidia-smi writes meanwhile (FIELDS, a line a sample), and summary.json, which
says when stages ran. Samples in which the GPU was idle count only where there are no others.
"""

import contextlib
import json
import statistics
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

FIELDS = "timestamp,clocks.sm,clocks.mem,utilization.gpu,power.draw,temperature.gpu"
BUSY = 50  # percent of the time


class Sample(NamedTuple):
    time: float  # in seconds since the epoch
    sm_mhz: float
    memory_mhz: float
    utilization: float
    watts: float
    celsius: float


def samples(text: str) -> Iterator[Sample]:
    """Lines that are cut short or have no number are left out."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            when, *values = (word.strip() for word in line.split(","))
            time = datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp()  # local, as it is
            yield Sample(time, *map(float, values))


def by_stage(polled: list[Sample], stages: list[dict]) -> dict[str, dict]:
    """{stage: {field: least, median and most of its samples}} of stages that have any."""
    found = {}
    for stage in stages:
        if stage["rc"] is None:
            continue
        end = stage["start"] + stage["seconds"]
        during = [sample for sample in polled if stage["start"] <= sample.time <= end]
        busy = [sample for sample in during if sample.utilization >= BUSY] or during
        if busy:
            found[stage["stage"]] = {"samples": len(busy)} | {
                field: _spread([getattr(sample, field) for sample in busy])
                for field in ("sm_mhz", "memory_mhz", "watts", "celsius")
            }
    return found


def _spread(values: list[float]) -> dict[str, float]:
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}


def main() -> None:
    out = Path(sys.argv[1])
    path = out / "environment.json"
    environment = json.loads(path.read_text()) if path.exists() else {}
    stages = json.loads((out / "summary.json").read_text())
    polled = list(samples((out / "clocks.csv").read_text()))
    environment["clocks"] = by_stage(polled, stages)
    path.write_text(json.dumps(environment, indent=1))


if __name__ == "__main__":
    main()
