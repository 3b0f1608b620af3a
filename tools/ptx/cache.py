"""Runs compilers and keeps their outputs in build/ptx.

The name of an output is a hash of its command and sources, so nothing is compiled twice.
"""

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock

FOLDER = Path(__file__).resolve().parents[2] / "build" / "ptx"


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Exclude other processes. They wait, and then find the compiled files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / "lock"):
        yield


def contents(paths: Sequence[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(paths))


def start(command, sources: bytes, name: str):
    """Start a compiler, unless its output exists. Return the output and an object for `finish`."""
    # The key does not contain folders, so a copied checkout can use its copy of the cache.
    words = [Path(word).name if "/" in str(word) else str(word) for word in command]
    key = hashlib.sha256(" ".join(words).encode() + sources).hexdigest()[:16]
    output = FOLDER / f"{key}-{name}"
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
