"""Ranks killed, stopped and interrupted.

A training on 2 to 4 ranks is hit by a signal at a random point, on a random rank: while it is
constructed, in its first step, in a later one or while it saves; one in four once more as it starts
again. Every other rank must end with an error, at most a second after the timeout of its groups; no
process, socket, temporary file, shared memory or namespace may be left; and a restart from the last
checkpoint must end with the same bits as a run that nothing disturbed.
"""

import collections
import functools
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from .processes import Mark, Ranks, free_port
from .trainings import EVERY, STEPS, Job, train

COUNTS = dict.fromkeys(("DDP", "averager", "FSDP2", "replicas"), 100)
QUICK = ("replicas",)  # a thousandth of all: a case
BATCH = 5
SECONDS = 3.0  # the timeout of the groups
SLACK = 1.0  # after it, until every rank has ended
PATIENCE = 10.0  # for one that has not, to see when it does
CALM = 120.0  # for runs that nothing disturbs; the timeout of their groups
ATTEMPTS = 3  # to send a signal before a run's end

SIGNALS = {
    "killed": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "interrupted": signal.SIGINT,
    "terminated": signal.SIGTERM,
}
MOMENTS = {  # the marks that begin them, by name and number; the last step and save are none
    "constructing": [("make", 0)],
    "in_first_step": [("step", 0)],
    "in_later_step": [("step", n) for n in range(1, STEPS - 1)],
    "saving": [("save", n) for n in range(STEPS // EVERY - 1)],
}
IN_RESTARTS = list(MOMENTS)[:2]  # which have few steps left


class Setting(NamedTuple):
    ranks: int
    replicas: int  # rows of the mesh, at doors that have one, or 0
    options: dict[str, Any]  # of the door


SETTINGS = {
    "DDP": [
        Setting(2, 0, {"density": 0.05}),
        Setting(3, 0, {"format": "int4"}),
        Setting(4, 0, {"density": 0.05, "transport": "reduce_scatter"}),
        Setting(4, 2, {"density": 0.05}),
    ],
    "averager": [
        Setting(2, 0, {"period": 2}),
        Setting(3, 0, {"period": 4}),
        Setting(4, 0, {"period": 2, "density": 0.05, "transport": "reduce_scatter"}),
    ],
    "FSDP2": [
        Setting(2, 2, {"density": 0.05}),
        Setting(4, 2, {"density": 0.05}),
        Setting(4, 2, {"format": "int4", "transport": "reduce_scatter"}),
        Setting(3, 3, {"density": 0.05, "transport": "reduce_scatter"}),
    ],
    "replicas": [
        Setting(2, 2, {"format": "int4"}),
        Setting(4, 2, {"format": "bfloat16", "density": 0.1}),
        Setting(3, 3, {"format": "bfloat16", "density": 0.1, "transport": "reduce_scatter"}),
        Setting(2, 2, {}),
    ],
}

Program = Callable[[Job], None]


class Hit(NamedTuple):
    """A signal to a rank, `delay` seconds after its n-th mark of a name."""

    sent: str
    rank: int
    name: str
    number: int
    delay: float
    hosts: bool  # whether rank 0 hosts the store


class Whole(NamedTuple):
    """A run that nothing disturbed."""

    digests: list[str]  # of what each rank has in the end
    lengths: dict[tuple[str, int], float]  # seconds from a rank's n-th mark of a name to its next


def run(door: str, first: int, count: int, seed: int) -> dict[str, Any]:
    """Counts of signals, of moments and of restarts with a checkpoint; the latest ends, in ms."""
    found: dict[str, Any] = {"failures": []}
    for number in range(first, first + count):
        one = case(door, number, seed)
        if one.late and not one.wrong:  # so may the machine have been: once more
            one = case(door, number, seed)
            one.counts["late_once"] += 1
        if what := "\n".join(one.late + one.wrong):
            found["failures"].append({"case": number, "what": what})
        for name, value in one.counts.items():
            before = found.get(name, value if name.startswith("max_") else 0)
            found[name] = max(before, value) if name.startswith("max_") else before + value
    return found


def case(door: str, number: int, seed: int) -> "Case":
    """A case, which has been run."""
    for attempt in range(ATTEMPTS):
        chance = random.Random(f"{seed} {door} {number} {attempt}")
        with tempfile.TemporaryDirectory() as folder:
            one = Case(door, number % len(SETTINGS[door]), train, Path(folder))
            if one.hit(one.draw(chance, MOMENTS)):
                if chance.random() < 0.25:
                    one.hit(one.draw(chance, IN_RESTARTS))
                one.restart()
                return one
    one.wrong.append(f"{ATTEMPTS} times the run ended before its signal")
    return one


@functools.cache
def whole(door: str, index: int) -> Whole:
    """The run of a setting, without a signal.

    Raises:
        RuntimeError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        one = Case(door, index, train, Path(folder))
        ranks, codes = one.undisturbed("whole")
        if any(codes):
            raise RuntimeError(f"exit codes {codes}:\n{ranks.printed(codes.index(max(codes)))}")
        lengths, numbers = {}, collections.Counter()
        for mark, after in itertools.pairwise(ranks.marks[0]):
            lengths[mark.name, numbers[mark.name]] = after.time - mark.time
            numbers[mark.name] += 1
        return Whole([_digest(marks) for marks in ranks.marks], lengths)


class Case:
    """Runs of one training, in one folder.

    Attributes:
        counts: of signals, moments and restarts; and the latest ends of ranks, in ms.
        late: ranks that ended too late, in words.
        wrong: all else that went wrong.
    """

    def __init__(self, door: str, index: int, program: Program, folder: Path) -> None:
        self._door, self._index, self._program, self._folder = door, index, program, folder
        self._setting = SETTINGS[door][index]
        self.counts: collections.Counter[str] = collections.Counter()
        self.late: list[str] = []
        self.wrong: list[str] = []

    def _start(self, seconds: float, name: str, hosts: bool = False) -> Ranks:
        checkpoints = self._folder / "checkpoints"
        checkpoints.mkdir(exist_ok=True)
        if not hosts:
            self._store = dist.TCPStore("127.0.0.1", is_master=True, wait_for_workers=False, port=0)
        port, (world, *given) = free_port() if hosts else self._store.port, self._setting
        jobs = [
            Job(self._door, rank, world, port, hosts, seconds, checkpoints, *given)
            for rank in range(world)
        ]
        return Ranks(self._program, jobs, self._folder / name)

    def undisturbed(self, name: str) -> tuple[Ranks, list[int]]:
        """Ranks, ended, and their exit codes."""
        ranks = self._start(CALM, name)
        ranks.watch(lambda: all(ranks.ends), CALM)
        return ranks, ranks.end()

    def draw(self, chance: random.Random, moments: Iterable[str]) -> Hit:
        sent, rank = chance.choice(list(SIGNALS)), chance.randrange(self._setting.ranks)
        name, number = chance.choice(MOMENTS[chance.choice(list(moments))])
        delay = chance.uniform(0, whole(self._door, self._index).lengths[name, number])
        return Hit(sent, rank, name, number, delay, hosts=chance.random() < 0.5)

    def hit(self, hit: Hit) -> bool:
        """A run with a signal; False if it came to its end before."""
        name = f"run {len(list(self._folder.iterdir()))}"
        ranks = self._start(SECONDS, name, hit.hosts)
        own = ranks.marks[hit.rank]
        try:
            ranks.watch(lambda: self._joined(ranks) and _count(own, hit.name) > hit.number, CALM)
            time.sleep(hit.delay)
            ranks.read()
            if any(mark.name == "end" for marks in ranks.marks for mark in marks):
                return False
            early = [rank for rank, end in enumerate(ranks.ends) if end]
            if not early:
                self._signal(ranks, hit)
        finally:
            codes = ranks.end()
        for rank in early:
            self.wrong.append(self._text(f"rank {rank} ended before any signal:", ranks, rank))
        if not early:
            self._require_errors(ranks, hit, codes)
        self._require_nothing_left(ranks)
        return True

    def _joined(self, ranks: Ranks) -> bool:
        """Whether all have the groups of the program's own, which torch makes as long as it likes.

        gloo tries five times to reach a rank that is gone, each up to the timeout, and the store
        waits for ever for a host that is stopped.
        """
        return all(any(mark.name == "make" for mark in marks) for marks in ranks.marks)

    def _signal(self, ranks: Ranks, hit: Hit) -> None:
        """Send it, wait for the ends of ranks, and say which come too late."""
        sent = time.monotonic()
        ranks.signal(hit.rank, SIGNALS[hit.sent])
        ranks.traces.look()
        running = [rank for rank in range(self._setting.ranks) if self._ends(rank, hit)]

        moment = _moment(ranks, hit.rank, sent)
        if not ranks.watch(lambda: all(map(ranks.left, running)), SECONDS + SLACK):
            for rank in running:
                if not ranks.left(rank):
                    ranks.signal(rank, signal.SIGUSR1)
        ranks.watch(lambda: all(ranks.ends[rank] for rank in running), PATIENCE)
        self.counts.update([hit.sent, moment])
        for rank in running:
            since = max(sent, ranks.waits_since(rank))
            after = (ranks.left(rank) or time.monotonic()) - since - SECONDS
            if hit.sent == "stopped":
                which = "rank_0" if hit.rank == 0 else "another"
                name = f"max_ms_after_timeout_{which}_stopped"
                self.counts[name] = max(self.counts.get(name, -(10**6)), round(1000 * after))
            told = f"rank {hit.rank} was {hit.sent} {moment}"
            told += ", and hosts the store" if hit.hosts and hit.rank == 0 else ""
            if not ranks.ends[rank]:
                text = f"rank {rank} had not ended {after:.1f} s after the timeout, {told}:"
                self.wrong.append(self._text(text, ranks, rank))
            elif after > SLACK:
                text = f"rank {rank} ended {after:.1f} s after the timeout, {told}:"
                self.late.append(self._text(text, ranks, rank))

    def _ends(self, rank: int, hit: Hit) -> bool:
        """Whether a rank is to end by itself."""
        return rank != hit.rank or hit.sent in ("interrupted", "terminated")

    def _require_errors(self, ranks: Ranks, hit: Hit, codes: list[int]) -> None:
        ours = (-signal.SIGKILL, -signal.SIGUSR1)  # to one that was late, which is said already
        for rank, code in enumerate(codes):
            if self._ends(rank, hit) and code not in (1, *ours):
                text = f"rank {rank} ended with {code}, not with an error, rank {hit.rank} was"
                self.wrong.append(self._text(f"{text} {hit.sent}:", ranks, rank))

    def _require_nothing_left(self, ranks: Ranks) -> None:
        self.wrong += [f"{left} was left" for left in ranks.traces.left()]

    def restart(self) -> None:
        """To its end, from the last checkpoint."""
        ranks, codes = self.undisturbed("restart")
        self.counts["from_a_checkpoint"] += _count(ranks.marks[0], "step") < STEPS
        for rank, code in enumerate(codes):
            if code:
                text = f"rank {rank} ended with {code} after a restart:"
                self.wrong.append(self._text(text, ranks, rank))
        digests = [_digest(marks) for marks in ranks.marks]
        if not any(codes) and digests != whole(self._door, self._index).digests:
            text = "after a restart there are other bits than without a signal"
            self.wrong.append(f"{text} ({self._setting})")
        self._require_nothing_left(ranks)
        files = sorted((self._folder / "checkpoints").rglob("*.tmp"))
        self.wrong += [f"{file} was left" for file in files]

    def _text(self, text: str, ranks: Ranks, rank: int) -> str:
        setting = f"({self._setting}; {os.getloadavg()[0]:.0f} processes wanted to run)"
        return f"{text} {setting}\n{ranks.printed(rank)}"


def _count(marks: list[Mark], name: str) -> int:
    return sum(mark.name == name for mark in marks)


def _digest(marks: list[Mark]) -> str:
    """What a rank told at its end."""
    return next((a.name for m, a in itertools.pairwise(marks) if m.name == "end"), "none")


def _moment(ranks: Ranks, rank: int, when: float) -> str:
    """What a rank did at a time."""
    names = [mark.name for mark in ranks.marks[rank] if mark.time <= when]
    if "step" not in names:
        return "constructing"
    if names[-1] == "save":
        return "saving"
    return "in_first_step" if names.count("step") == 1 else "in_later_step"
