"""Runs a part's cases, batch by batch, and keeps what came of them in a file after each.

The file is an experiment of bench/results (bench/pages/experiments.py) with a run for each door:

    {"door", "asked", "done", "failed", "seconds", counts of the part's own, "failures": [...]}
"""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import provenance
from dlrm.errors import UsageError
from pages import experiments

OWN = ("door", "asked", "done", "failed", "seconds")


def read(path: Path, part: ModuleType, seed: int) -> dict[str, Any]:
    """What a file has of a part, or the beginning of one.

    Raises:
        UsageError: the file is of another seed or part.
    """
    name = part.__name__.rpartition(".")[2]
    title, _, checks = (part.__doc__ or "").partition("\n\n")
    head = {
        "title": title.rstrip("."),
        "group": "Reliability",
        "question": " ".join(checks.partition("\n\n")[0].split()),
        "answer": "",
        "command": f"make reliability PART={name}",
        "settings": {"seed": seed},
    }
    if not path.exists():
        return head | {"runs": []}
    content = json.loads(path.read_text())
    for key, value in (("command", head["command"]), ("settings", head["settings"])):
        if content[key] != value:
            rule = "give another --out"
            raise UsageError(f"--out must be of {key} {value}, {path} has {content[key]}: {rule}")
    return content | head


def batches(
    part: ModuleType, content: dict[str, Any], counts: Mapping[str, int], minutes: float
) -> Iterator[dict[str, Any]]:
    """Runs what is not done yet of `counts` at each door; gives a door's run after every batch."""
    end = time.monotonic() + 60 * minutes
    for door, asked in counts.items():
        run = _run_of(content, door)
        run["asked"] = asked
        while run["done"] < asked:
            if time.monotonic() > end:
                return
            start = time.monotonic()
            count = min(part.BATCH, asked - run["done"])
            found = part.run(door, run["done"], count, content["settings"]["seed"])
            _add(run, found, count, time.monotonic() - start)
            yield run


def _run_of(content: dict[str, Any], door: str) -> dict[str, Any]:
    for run in content["runs"]:
        if run["door"] == door:
            return run
    content["runs"].append(dict.fromkeys(OWN, 0) | {"door": door, "failures": []})
    return content["runs"][-1]


def _add(run: dict[str, Any], found: Mapping[str, Any], count: int, seconds: float) -> None:
    run["done"] += count
    run["seconds"] = round(run["seconds"] + seconds, 1)
    run["failures"] += found["failures"]
    run["failed"] = len(run["failures"])
    for name, value in found.items():
        if name.startswith("max_"):
            run[name] = max(run.get(name, value), value)
        elif name != "failures":
            run[name] = run.get(name, 0) + value


def write(path: Path, content: dict[str, Any]) -> None:
    """With where and when it was run; all commits, where others went on with it."""
    made = provenance.made()
    commits = dict.fromkeys([*content.get("commit", "").split(", "), made["commit"]])
    content |= made | {"commit": ", ".join(filter(None, commits))}
    done, asked, failed = (
        sum(run[key] for run in content["runs"]) for key in ("done", "asked", "failed")
    )
    content["answer"] = f"{done:,} cases of {asked:,} were run, {failed or 'none'} failed."
    path.parent.mkdir(parents=True, exist_ok=True)
    experiments.write(path, content)
