"""Runs compilers for tests, and keeps what they make.

A product is kept under a name that follows from its command and its sources, so nothing is compiled
twice.
"""

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock


@contextlib.contextmanager
def alone(cache: Path) -> Iterator[None]:
    """Other processes that build into `cache` wait, and then find what they need."""
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"):
        yield


def contents(paths: Sequence[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(paths))


def start(command, sources: bytes, cache: Path, name: str):
    """Start `command`, unless what it makes is there; returns that, and what to wait for."""
    # The key holds no folder: a copy of the tree finds what was built in the cache it copied.
    words = [Path(word).name if "/" in str(word) else str(word) for word in command]
    key = hashlib.sha256(" ".join(words).encode() + sources).hexdigest()[:16]
    output = cache / f"{key}-{name}"
    if output.exists():
        return output, None
    partial = output.with_name(f"{output.name}.{os.getpid()}")
    return output, (subprocess.Popen([*command, "-o", partial]), partial, output)


def finish(started) -> None:
    if started is None:
        return
    process, partial, output = started
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)
    partial.rename(output)
