"""What processes hold, and what of it is still there when they are gone. Linux only."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_SOCKETS = {"tcp": 9, "tcp6": 9, "udp": 9, "udp6": 9, "unix": 6}  # where the inode is in a line
_SHARED = Path("/dev/shm")


class Traces:
    """Of processes that lead a session each, as far as was looked.

    Args:
        pids: theirs.
        temporary: the folder that they were given for temporary files.
    """

    def __init__(self, pids: Iterable[int], temporary: Path) -> None:
        self._pids, self._temporary = set(pids), temporary
        self._sockets: set[str] = set()
        self._shared: set[Path] = set()
        self._namespaces: set[str] = set()

    def look(self) -> None:
        """Note what the processes hold now."""
        for pid in self._pids:
            # Any of it may be gone in between, like the process.
            with contextlib.suppress(OSError):
                for entry in os.scandir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        self._note(os.readlink(entry.path))
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    self._note(line.partition("/")[1] + line.partition("/")[2])
                self._namespaces |= _namespaces(str(pid)) - _namespaces("self")

    def _note(self, held: str) -> None:
        kind, _, inode = held.partition(":[")
        if kind == "socket":
            self._sockets.add(inode.rstrip("]"))
        elif Path(held).parent == _SHARED:
            self._shared.add(Path(held))

    def left(self) -> list[str]:
        """What stayed behind, in words. Call it when all processes have ended."""
        found = [f"process {pid} of rank {of}" for pid, of in _sessions() if of in self._pids]
        found += [f"namespace {name}" for name in sorted(self._namespaces)]
        for kind, column in _SOCKETS.items():
            lines = Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
            there = {line.split()[column] for line in lines}
            found += [f"{kind} socket {inode}" for inode in sorted(self._sockets & there)]
        own = {path for path in _SHARED.iterdir() if self._is_own(path.name)}
        found += [f"{path}" for path in sorted(own | self._shared) if path.exists()]
        for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
            if int(line.split()[4]) in self._pids:
                found.append(f"System V shared memory {line.split()[1]}")
        return found + [f"{path}" for path in sorted(self._temporary.rglob("*"))]

    def _is_own(self, name: str) -> bool:
        """Whether it is named after one of the processes, as torch names what it shares."""
        return any(str(pid) in name.replace("-", "_").split("_") for pid in self._pids)


def _namespaces(pid: str) -> set[str]:
    folder = f"/proc/{pid}/ns"
    return {os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}


def _sessions() -> Iterable[tuple[int, int]]:
    """(process, the one that leads its session) of all that run."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                yield int(entry.name), int(fields[3])
