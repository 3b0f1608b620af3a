"""Random programs that call the public API.

Programs contain steps, skipped steps, accumulation, take_back, flush, checkpoints, changes of the
number of ranks, NaN and overflow. After each program, all finite contributions of
ranks are in the weights or pending, except entries that are lost with a non-finite one. Each entry
is compared with float64 sums, up to float32 rounding. Replicas are bitwise identical. Unless
`refresh_every` is above 1, a run that resumes from a checkpoint is bitwise identical to an
uninterrupted run.

A program consists of settings and a list of calls of `Runner` methods. To repeat a program:

    python -c "from reliability import programs; programs.rerun('hook', RANKS, SETTINGS, CALLS)"
"""

import contextlib
import importlib
import random
import time
from collections import Counter

from .pool import Failed, Pool

COUNTS = dict.fromkeys(("hook", "averager", "fsdp2"), 1000)
BATCH = 50
SHRINK_SECONDS = 120  # time limit for shortening a program that fails


def draw_program(entry_point, number, seed):
    """Return a program: (number of ranks, settings, calls)."""
    return module_of(entry_point).draw(random.Random(f"{seed} {entry_point} {number}"))


def run(entry_point, first, count, seed):
    counts, failures = Counter(), []
    with contextlib.ExitStack() as stack:
        pools = {}
        for number in range(first, first + count):
            program = draw_program(entry_point, number, seed)
            ranks = program[0]
            if ranks not in pools:
                pools[ranks] = stack.enter_context(Pool(ranks))
            counts.update(name for name, *_ in program[2])
            try:
                pools[ranks].call(play, entry_point, *program[1:])
            except Failed as failed:
                shorter, text = shrink(pools[ranks], entry_point, program, str(failed))
                failures.append({"case": number, "what": f"{entry_point}, {shorter}:\n{text}"})
    return {"failures": failures, **counts}


def shrink(pool, entry_point, program, text):
    """Remove calls while the program still fails; return the program and its error."""
    ranks, settings, calls = program
    at, end = 0, time.monotonic() + SHRINK_SECONDS
    while at < len(calls) and time.monotonic() < end:
        fewer = calls[:at] + calls[at + 1 :]
        try:
            pool.call(play, entry_point, settings, fewer)
            at += 1
        except Failed as failed:
            calls, text = fewer, str(failed)
    return (ranks, settings, calls), text


def rerun(entry_point, ranks, settings, calls):
    with Pool(ranks) as pool:
        pool.call(play, entry_point, settings, calls)


def play(rank, entry_point, settings, calls):
    """Run a program on one of its ranks."""
    runner = module_of(entry_point).Runner(rank, **settings)
    for number, (name, *args) in enumerate(calls):
        try:
            if not runner.idle or name in runner.ON_IDLE_RANKS:
                getattr(runner, name)(*args)
        except BaseException as error:
            raise RuntimeError(f"in call {number}, {name}{(*args,)}") from error
    if not runner.idle:
        runner.end()


def module_of(name):
    return importlib.import_module(f"reliability.{name}")
