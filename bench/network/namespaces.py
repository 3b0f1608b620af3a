"""Networks for ranks: namespaces connected by throttled links, or this machine's loopback.

    rank 0  eth0 ======= port0
    rank 1  eth0 ======= port1  bridge
    rank 2  eth0 ======= port2

Every rank is in a namespace. A link is a veth pair with a token bucket filter (tc tbf) at both
ends, so each direction has the full rate, as on a switched, full-duplex network. The bridge has its
own namespace. The name of each namespace starts with dctbench-. Deleting these namespaces removes
all links. The links carry only the IPv4 traffic of the ranks.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.cli import ENDING_SIGNALS, UsageError

PREFIX = "dctbench-"
SWITCH = PREFIX + "switch"
# After a pause, the token bucket is full, so a message can arrive earlier by up to this time.
# With a bucket for 100 us, a 1 Gbit/s link on busy cores reached 57 to 92 % of its rate.
BURST_SECONDS = 500e-6
BURST_MIN_BYTES = 3 * 1514
LOCK_SECONDS = 2
QUEUE_MS = 50  # packets that would wait longer for tokens are dropped


def missing() -> list[str]:
    """Descriptions of the missing requirements for namespaces on this machine."""
    lacks = [f"the command `{name}` (package iproute2)" for name in ("ip", "tc") if not _has(name)]
    if os.geteuid() != 0:
        lacks.append("root")
    return lacks


class Namespaces:
    """A context with one linked namespace per rank. On exit, ends processes and namespaces.

    Only one such context can be active on a machine, because a second context would distort the
    times. On entry, removes the namespaces of a killed run.
    """

    interface = "eth0"

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._limited = False

    def __enter__(self) -> "Namespaces":
        if lacks := missing():
            raise UsageError(f"needs {' and '.join(lacks)}, or --loopback (no rate limit)")
        self._lock = _lock()
        try:
            _remove_all()
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Block a second Ctrl-C, because it could leave some namespaces behind.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        _remove_all()
        self._lock.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def address(self, rank: int) -> str:
        """The IPv4 address of the rank's interface."""
        return f"10.210.0.{rank + 1}"

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """Wrap `command` so that it runs inside the rank's namespace."""
        return ["ip", "netns", "exec", _name(rank), *command]

    def set_rate(self, rate: float | None) -> None:
        """Limit all links to `rate` bits per second in each direction; None removes the limit."""
        ends = [(_name(rank), self.interface) for rank in range(self._ranks)]
        ends += [(SWITCH, f"port{rank}") for rank in range(self._ranks)]
        for namespace, interface in ends:
            if rate is not None:
                burst = max(BURST_MIN_BYTES, int(rate / 8 * BURST_SECONDS))
                limit = f"rate {rate:.0f}bit burst {burst}b latency {QUEUE_MS}ms"
                _do(f"tc -n {namespace} qdisc replace dev {interface} root tbf {limit}")
            elif self._limited:
                _do(f"tc -n {namespace} qdisc del dev {interface} root")
        self._limited = rate is not None

    def _build(self) -> None:
        _do(f"ip netns add {SWITCH}")
        _do(f"ip -n {SWITCH} link add bridge type bridge")
        _do(f"ip -n {SWITCH} link set bridge addrgenmode none up")
        for rank in range(self._ranks):
            name, port, interface = _name(rank), f"port{rank}", self.interface
            _do(f"ip netns add {name}")
            _do(f"ip -n {name} link set lo up")
            _do(f"ip -n {SWITCH} link add {port} type veth peer name {interface} netns {name}")
            _do(f"ip -n {SWITCH} link set {port} addrgenmode none master bridge up")
            _do(f"ip -n {name} link set {interface} addrgenmode none up")
            _do(f"ip -n {name} addr add {self.address(rank)}/24 dev {interface}")


class Loopback:
    """The API of `Namespaces` without namespaces or rate limits. All ranks use 127.0.0.1."""

    interface = "lo"

    def __init__(self, ranks: int) -> None:
        pass

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def address(self, rank: int) -> str:
        return "127.0.0.1"

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        return list(command)

    def set_rate(self, rate: None) -> None:
        pass


def _name(rank: int) -> str:
    return f"{PREFIX}rank{rank}"


def _has(name: str) -> bool:
    return shutil.which(name) is not None


def _lock():
    """Open a file that stays locked until this process ends.

    If a run was killed while it forked a child, the child holds the file until it calls exec.
    Therefore, this function retries for a short time.
    """
    file = (Path(tempfile.gettempdir()) / f"{PREFIX}lock").open("w")
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                text = "another run is active on this machine: wait until it ends"
                raise UsageError(text) from None
            time.sleep(0.05)


def _remove_all() -> None:
    """Remove all of our namespaces and the processes in them. Needs the lock."""
    for name in _do("ip netns list").split():
        if name.startswith(PREFIX):
            for pid in _do(f"ip netns pids {name}").split():
                os.kill(int(pid), signal.SIGKILL)
            _do(f"ip netns del {name}")


def _do(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        text = done.stderr.strip() or f"exit status {done.returncode}"
        raise UsageError(f"`{command}` failed: {text}; --loopback does not need it")
    return done.stdout
