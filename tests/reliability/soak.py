"""A hundred thousand steps.

Of a small model on 2 ranks, each rank one process for all of them: replicas are equal bit for bit
after every exchange; every 500 steps nothing of what was put in is lost, not one bit of it, and
the ranks go on from a checkpoint in new objects; memory, file handles and threads do not grow.
Gradients are multiples of 1/8 and the largest entries are sent, so that no sum is rounded.

A case is 100 steps; those of a batch follow one another. Some steps are skipped and taken back, NaN
and all, some accumulate.
"""

import os
import random
from pathlib import Path

from .pool import Failed, Pool
from .programs import door_of

COUNTS = dict.fromkeys(("hook", "averager", "fsdp2", "replicas"), 1000)
QUICK = ("hook", "fsdp2")
BATCH = 1000  # so that one process takes all steps of a door
STEPS, CHECKED = 100, 500  # of a case, and between checks
WARM = 0.2  # of a run: memory may grow in it
MEGABYTES = 8  # that memory may grow by afterwards: pages that the allocator keeps

_SHAPES = [(), (130,), (40, 33, "t"), (900,)]
_OPTIONS = {"format": "bfloat16", "density": 0.02}
SETTINGS = {
    "hook": {
        "ranks": 2,
        "shapes": _SHAPES,
        "frozen": [],
        "options": _OPTIONS | {"start_step": 0},
        "bucket_mb": 0.004,
        "view": False,
        "scale": None,
    },
    "averager": {
        "ranks": 2,
        "shapes": _SHAPES,
        "dtypes": ["float32"] * len(_SHAPES),
        "frozen": [],
        "options": _OPTIONS | {"period": 5},
    },
    "fsdp2": {
        "mesh": (2, 1),
        "units": [[(130,), (40, 33)], [(900,)]],
        "frozen": False,
        "options": _OPTIONS | {"start_step": 0},
        "scale": None,
    },
    "replicas": {
        "mesh": (2, 1),
        "rows": [40, 150],
        "width": 8,
        "optimizer": "sgd",
        "options": _OPTIONS | {"every": 5},
        "dedup": False,
        "sparse": True,
    },
}


def run(door, first, count, seed):
    steps = STEPS * count
    with Pool(2) as pool:
        try:
            told = pool.call(soak, door, steps, f"{seed} {door} {first}", seconds=120 + steps / 10)
        except Failed as failed:
            return {"failures": [{"case": first, "what": f"{door}: {failed}"}], "steps": 0}
    failures = []
    for rank, samples in enumerate(told):
        grown = _grown(samples)
        if grown["megabytes"] > MEGABYTES or grown["handles"] > 0 or grown["threads"] > 0:
            failures.append({"case": first, "what": f"{door}: rank {rank} grew by {grown}"})
    most = {f"max_{key}_grown": max(_grown(s)[key] for s in told) for key in _grown(told[0])}
    return {"failures": failures, "steps": steps, **most}


def _grown(samples):
    """By how much the second half is above what came after the warm-up."""
    names = ("megabytes", "handles", "threads")
    early, late = (
        samples[int(WARM * len(samples)) : len(samples) // 2],
        samples[len(samples) // 2 :],
    )
    if not early:
        return dict.fromkeys(names, 0)
    most = zip(*(map(max, zip(*part, strict=True)) for part in (early, late)), strict=True)
    return {name: max(after - before, 0) for name, (before, after) in zip(names, most, strict=True)}


def soak(rank, door, steps, seed):
    """What a rank had in use, [(megabytes, file handles, threads)], at every check."""
    draw, samples = random.Random(seed), []
    own = door_of(door).Door(rank, **SETTINGS[door], whole=True)
    for number in range(1, steps + 1):
        own.step(_step(door, draw))
        if number % CHECKED == 0 or number == steps:
            own.check()
            own.replay("new", [_step(door, draw) for _ in range(3)])
            samples.append(_in_use())
    own.end()
    return samples


def _step(door, draw):
    step = door_of(door).draw_step(draw, 2)
    if "bad" in step and (draw.random() < 0.9 or door == "replicas"):
        del step["bad"]  # in tables it stays
    if "bad" in step and "then" in step:
        step["then"] = "take_back"
    if "passes" in step:
        step["no_sync"] = True  # a second exchange would halve what entries are multiples of
    return step


def _in_use():
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return resident >> 20, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
