"""Runs compilers and keeps their outputs in build/ptx.

The name of an output contains a hash of command and sources, so nothing is compiled twice.
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
    """Hold a lock. Other processes wait for it, and then find the compiled files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / "lock"):
        yield


def contents(paths: Sequence[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(paths))


def start(command, sources: bytes, name: str):
    """Start a compiler unless its output exists. Return the output and an argument for `finish`."""
    # The hash does not depend on folders, so a copied checkout can use its copied cache.
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
