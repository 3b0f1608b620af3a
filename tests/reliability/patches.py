"""A publisher and a subscriber of weight patches, which are killed at random moments.

In each case, one of the processes or both are killed several times, and started again. Then the
publisher sends three more versions. It records the bits of each version before it sends the
version. Whenever a call of the subscriber returns or raises, its weights must have the recorded
bits. At the end, it has the last version. The only errors are a folder that is still empty, and in
a gloo group, a lost connection, and the request for a full copy after a restart.

Results count in which call a process was killed, for example "publisher save".
"""

import hashlib
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dct_patches import WeightPublisher, WeightSubscriber, broadcast_patch
from support import forked
from support.weights import bits, initial, published, receiver, step

COUNTS = {"folder": 100, "group": 100}
BATCH = 10
KILLS, LAST_VERSIONS = 3, 3
NAMES = ("publisher", "subscriber")  # ranks 0 and 1
SECONDS_BEFORE_KILL = 0.1  # at most, after a random number of calls of the subscriber
TIMEOUT = timedelta(seconds=15)  # of a group, if a process is killed while it joins
SECONDS = 60  # time limit of a wait
# Indices of shared numbers. CHECKS: calls of the subscriber. READY: the attempt of each process.
ATTEMPT, ENDED, CHECKS, READY = range(4)


def run(entry_point, first, count, seed):
    forked.start()
    counts, failures = Counter(), []
    for number in range(first, first + count):
        drawn, processes = random.Random(f"{seed} {entry_point} {number}"), {}
        with tempfile.TemporaryDirectory() as folder:
            try:
                _case(entry_point, Path(folder), drawn, processes, counts)
            except AssertionError as error:
                failures.append({"case": number, "what": str(error)})
            for process in processes.values():
                process.kill()
                process.join()
    return {"failures": failures, **counts}


def _case(transport, folder, drawn, processes, counts):
    shared = forked.context.RawArray("i", READY + len(NAMES))
    calls = {name: forked.context.RawArray("c", 32) for name in NAMES}

    def start(names):
        for name in names:
            args = name, transport, folder, shared, calls[name], drawn.randrange(10**6)
            processes[name] = forked.context.Process(target=_work, args=args)
            processes[name].start()

    def require_end(name, code):
        processes[name].join(SECONDS)
        texts = [path.read_text() for path in folder.glob("error-*")]
        found = f"the {name} ended with {processes[name].exitcode} in {calls[name].value}: {texts}"
        assert processes[name].exitcode == code, found

    start(NAMES)
    for attempt in range(1, KILLS + 1):
        checks = shared[CHECKS] + drawn.choice([0, 1, 3, 6])  # 0: kill them while they start
        until = time.monotonic() + SECONDS
        while shared[CHECKS] < checks and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(drawn.uniform(0, SECONDS_BEFORE_KILL))
        killed = drawn.choice([NAMES[:1], NAMES[1:], NAMES])
        for name in killed:
            processes[name].kill()
            require_end(name, -9)
            counts[f"{name} {calls[name].value.decode() or 'start'}"] += 1
            calls[name].value = b""
        shared[ATTEMPT] = attempt
        start(killed)
    require_end("publisher", 0)
    shared[ENDED] = 1
    require_end("subscriber", 0)


def _work(name, transport, folder, shared, call, seed):
    torch.set_num_threads(1)
    signal.alarm(4 * SECONDS)  # ends it if the run is stopped
    try:
        worker = (Publisher if name == NAMES[0] else Subscriber)(folder, shared, call, seed)
        getattr(worker, transport)()
        assert worker.end.id == [*worker.recorded()][-1]
    except BaseException:
        (folder / f"error-{name}").write_text(traceback.format_exc())
        raise SystemExit(1) from None


class Worker:
    """A process. `end` is its WeightPublisher or WeightSubscriber."""

    def __init__(self, folder, shared, name, seed):
        self._versions, self._records = folder / "versions", folder / "records"
        self._shared, self._name, self._drawn = shared, name, random.Random(seed)
        self._weights = initial() | {"table": torch.linspace(-1, 1, 50_000)}

    def _call(self, function, *args, **options):
        self._name.value = function.__name__.encode()
        return function(*args, **options)

    def recorded(self):
        return dict(line.split() for line in self._records.read_text().splitlines())

    def group(self):
        """Exchange versions in a new group after each kill."""
        self._create()
        attempt, left, rank = -1, LAST_VERSIONS, self.RANK
        while left:
            while attempt == self._shared[ATTEMPT]:
                self._call(time.sleep, 0.002)
            attempt = self._shared[READY + rank] = self._shared[ATTEMPT]
            while self._shared[READY + 1 - rank] < attempt == self._shared[ATTEMPT]:
                self._call(time.sleep, 0.002)
            if attempt != self._shared[ATTEMPT]:
                continue
            try:
                store = dist.FileStore(f"{self._records}-{attempt}", 2)
                self._call(dist.init_process_group, "gloo", None, TIMEOUT, 2, rank, store)
                while left:
                    left -= self._exchange() and attempt == KILLS
            except RuntimeError:  # the other process was killed
                assert attempt < KILLS
            if dist.is_initialized():
                self._call(dist.destroy_process_group)
            # torch names groups by this number, and also counts groups that it could not join.
            dist.distributed_c10d._world.group_count = 0


class Publisher(Worker):
    RANK = 0

    def folder(self):
        if (self._versions / "index.json").exists():
            self.end = self._call(WeightPublisher.resume, self._versions, self._weights)
            parts = {part.name: part.data.numpy() for part in self.end.full().parts}
            assert _digest(parts) == self.recorded()[self.end.id]
        else:
            self._create()
            self._call(self.end.full().save, self._versions)
        left = LAST_VERSIONS
        while left:
            left -= self._shared[ATTEMPT] == KILLS
            patch = self._diff()
            self._call(patch.save, self._versions, keep=2)
            self._call(self.end.confirm, patch)
            if self._drawn.random() < 0.3:
                self._call(self.end.full().save, self._versions, keep=2)

    def _exchange(self):
        """Send a patch, or a full copy if the subscriber asks for it. Return if it was a patch."""
        patch = self._diff()
        try:
            self._call(broadcast_patch, patch, 0)
        except RuntimeError as error:
            if "full copy" not in str(error):
                raise
            self._call(broadcast_patch, self.end.full(), 0)
            return False
        self._call(self.end.confirm, patch)
        return True

    def _create(self):
        self.end = self._call(WeightPublisher, self._weights)
        self._record(self.end.id)

    def _diff(self):
        self._call(step, self._weights, 0.05, self._drawn.randrange(10**6))
        patch = self._call(self.end.diff, self._weights)
        self._record(patch.id)
        return patch

    def _record(self, id):
        with open(self._records, "a") as file:
            file.write(f"{id} {_digest(published(self._weights))}\n")


class Subscriber(Worker):
    RANK = 1

    def folder(self):
        self._create()
        ended = False
        while not ended:
            ended = self._shared[ENDED]
            try:
                self._call(self.end.update, self._versions)
            except FileNotFoundError as error:
                assert "folder must have a full copy" in str(error) and not ended
            self._call(self._check)

    def _exchange(self):
        try:
            patch = self._call(broadcast_patch, None, 0, subscriber=self.end)
        except ValueError as error:
            assert "full copy" in str(error)
            return False
        finally:
            self._call(self._check)
        return not patch.is_full

    def _create(self):
        self._tensors = receiver(self._weights)
        self.end = WeightSubscriber(self._tensors)

    def _check(self):
        self._shared[CHECKS] += 1
        if self.end.id is not None:
            assert _digest(bits(self._tensors)) == self.recorded()[self.end.id]


def _digest(arrays):
    content = b"".join(name.encode() + arrays[name].tobytes() for name in sorted(arrays))
    return hashlib.sha1(content).hexdigest()
