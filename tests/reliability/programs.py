"""Random programs over the public API.

Steps, skipped steps, accumulation, take_back, flush, checkpoints, other numbers of ranks, NaN,
overflow, wrong calls: after each program all that ranks put in is in the weights or pending, per
entry, as in one process in float64, to float32 rounding; replicas are equal bit for bit; a
checkpoint goes on bit for bit; what is refused is refused in a sentence, and changes nothing.

A program is a door's settings and a list of calls, each a method of its `Door`. To run one again:

    python -c "from reliability import programs; programs.again('hook', RANKS, SETTINGS, CALLS)"
"""

import contextlib
import importlib
import random
import time
from collections import Counter

from .pool import Failed, Pool

COUNTS = dict.fromkeys(("hook", "averager", "fsdp2", "replicas"), 1000)
BATCH = 50
SHRINKS = 120  # seconds in which a program that fails is made shorter


def drawn(door, number, seed):
    """A program: (the ranks it needs, settings, calls)."""
    return door_of(door).draw(random.Random(f"{seed} {door} {number}"))


def run(door, first, count, seed):
    counts, failures = Counter(), []
    with contextlib.ExitStack() as stack:
        pools = {}
        for number in range(first, first + count):
            program = drawn(door, number, seed)
            ranks = program[0]
            if ranks not in pools:
                pools[ranks] = stack.enter_context(Pool(ranks))
            counts.update(name for name, *_ in program[2])
            try:
                pools[ranks].call(play, door, *program[1:])
            except Failed as failed:
                shorter, text = shrunk(pools[ranks], door, program, str(failed))
                failures.append({"case": number, "what": f"{door}, {shorter}:\n{text}"})
    return {"failures": failures, **counts}


def shrunk(pool, door, program, text):
    """The shortest program found by leaving out calls that still fails, and how it does."""
    ranks, settings, calls = program
    at, end = 0, time.monotonic() + SHRINKS
    while at < len(calls) and time.monotonic() < end:
        fewer = calls[:at] + calls[at + 1 :]
        try:
            pool.call(play, door, settings, fewer)
            at += 1
        except Failed as failed:
            calls, text = fewer, str(failed)
    return (ranks, settings, calls), text


def again(door, ranks, settings, calls):
    with Pool(ranks) as pool:
        pool.call(play, door, settings, calls)


def play(rank, door, settings, calls):
    """A program, on one of its ranks."""
    own = door_of(door).Door(rank, **settings)
    for number, (name, *args) in enumerate(calls):
        try:
            if not own.idle or name in own.OF_ALL:
                getattr(own, name)(*args)
        except BaseException as error:
            raise RuntimeError(f"in call {number}, {name}{(*args,)}") from error
    if not own.idle:
        own.end()


def door_of(name):
    return importlib.import_module(f"reliability.{name}")
