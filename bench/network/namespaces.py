"""Where ranks run: network namespaces joined by links of a set rate, or this machine's loopback.

    node 0  eth0 ======= port0
    node 1  eth0 ======= port1  bridge
    node 2  eth0 ======= port2

A node is a namespace, of one rank or several, who reach each other without the link. A link is a
veth pair with a token bucket filter (tc tbf) at both ends, so that each direction has the full
rate, as on a switched, full-duplex network. Everything, the bridge too, lives in namespaces called
dctbench-*: nothing outside changes, and to delete them is to delete it all.
IPv4 only; nothing but the ranks' own traffic is on these links.
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
# Tokens for so long are what a message after a pause gets for free: little, so that small
# messages are not flattered; but a bucket must hold a few packets or the rate is not reached.
BURST_SECONDS = 100e-6
BURST_MIN_BYTES = 3 * 1514
LOCK_SECONDS = 2
QUEUE_MS = 50  # of packets that wait for tokens, beyond which they are dropped


def missing() -> list[str]:
    """What this machine lacks for namespaces, in words; empty if nothing."""
    lacks = [f"the command `{name}` (package iproute2)" for name in ("ip", "tc") if not _has(name)]
    if os.geteuid() != 0:
        lacks.append("root")
    return lacks


class Namespaces:
    """A context: a namespace for every node, linked; gone afterwards, with every process in them.

    Ranks are numbered node by node. One at a time on a machine: two would disturb each other's
    times. What a run that was killed has left behind is removed first.

    Raises:
        UsageError: the machine lacks something, or another run is at work.
    """

    interface = "eth0"

    def __init__(self, ranks: int, local_size: int = 1) -> None:
        self._nodes = ranks // local_size
        self._local_size = local_size
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
        # An impatient second Ctrl-C waits: half of the namespaces would stay.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        _remove_all()
        self._lock.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def address(self, rank: int) -> str:
        """IPv4, of the interface of the rank's node."""
        return _address(rank // self._local_size)

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """`command`, to be run inside the namespace of the rank's node."""
        return ["ip", "netns", "exec", _name(rank // self._local_size), *command]

    def set_rate(self, rate: float | None) -> None:
        """Limit every link, both directions, to `rate` bits per second; None: no limit."""
        ends = [(_name(node), self.interface) for node in range(self._nodes)]
        ends += [(SWITCH, f"port{node}") for node in range(self._nodes)]
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
        for node in range(self._nodes):
            name, port, interface = _name(node), f"port{node}", self.interface
            _do(f"ip netns add {name}")
            _do(f"ip -n {name} link set lo up")
            _do(f"ip -n {SWITCH} link add {port} type veth peer name {interface} netns {name}")
            _do(f"ip -n {SWITCH} link set {port} addrgenmode none master bridge up")
            _do(f"ip -n {name} link set {interface} addrgenmode none up")
            _do(f"ip -n {name} addr add {_address(node)}/24 dev {interface}")


class Loopback:
    """The same interface without namespaces or rate limits: every rank on 127.0.0.1."""

    interface = "lo"

    def __init__(self, ranks: int, local_size: int = 1) -> None:
        pass

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def address(self, rank: int) -> str:
        return "127.0.0.1"

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        return list(command)

    def set_rate(self, rate: float | None) -> None:
        if rate is not None:
            raise UsageError("--loopback has no rate limit: --rates must be unlimited")


def _name(node: int) -> str:
    return f"{PREFIX}node{node}"


def _address(node: int) -> str:
    return f"10.210.0.{node + 1}"


def _has(name: str) -> bool:
    return shutil.which(name) is not None


def _lock():
    """An open file, locked; the lock ends with the process, however that ends.

    Nearly: what a killed run was just starting holds a copy of the file until its exec, so that
    a lock which is taken is asked for again, for a moment.
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
                text = "another run is at work on this machine: wait for its end"
                raise UsageError(text) from None
            time.sleep(0.05)


def _remove_all() -> None:
    """Every namespace of ours and what runs in it. Only under the lock: all others are dead."""
    for name in _do("ip netns list").split():
        if name.startswith(PREFIX):
            for pid in _do(f"ip netns pids {name}").split():
                os.kill(int(pid), signal.SIGKILL)
            _do(f"ip netns del {name}")


def _do(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        text = done.stderr.strip() or f"exit status {done.returncode}"
        raise UsageError(f"`{command}` failed: {text}; --loopback does without")
    return done.stdout
