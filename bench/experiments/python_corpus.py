"""Python sources as a corpus: those of torch and sympy, as they are installed.

A text of some 70 million characters that nobody tuned anything for, and that whoever runs this has:
printable ASCII and line ends; others are dropped. Files that were generated are left out.
"""

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.cli import UsageError

VERSIONS = {"torch": "2.13.0", "sympy": "1.14.0"}
SHA256 = "c5115c79dfc638a437f2776a7b715b7046c9ed705d62d4cf98e6a3ccbab038d3"
KNOWN = b"\n" + bytes(range(ord(" "), ord("~") + 1))  # characters, by their numbers
DROPPED = bytes(set(range(256)) - set(KNOWN))
WRITTEN_BY_BUILDS = {"torch/version.py"}  # not the same in every build of a version
LONGEST_LINE, MOST_DIGITS = 80, 0.2  # of a file that somebody wrote: a line's mean, and the share
PARTS = {0: "validation", 1: "test"}  # one in 32 files each, by a hash of the path


class Source(NamedTuple):
    """A file: its path from the package on, and what is read of it."""

    path: str
    text: bytes

    def part(self) -> str:
        return PARTS.get(zlib.crc32(self.path.encode()) % 32, "train")

    def is_generated(self) -> bool:
        """Whether it is mostly numbers, or has lines that nobody writes."""
        lines = 1 + self.text.count(b"\n")
        digits = sum(self.text.count(digit) for digit in b"0123456789")
        return len(self.text) > LONGEST_LINE * lines or digits > MOST_DIGITS * len(self.text)


def installed() -> list[Source]:
    """The corpus.

    Raises:
        UsageError: other versions are installed.
    """
    sources = read({name: Path(find_spec(name).origin).parent for name in VERSIONS})
    digest = hashlib.sha256(b"".join(source.text for source in sources)).hexdigest()
    if digest != SHA256:
        wanted = ", ".join(f"{name} {known}" for name, known in VERSIONS.items())
        got = ", ".join(f"{name} {version(name)}" for name in VERSIONS)
        raise UsageError(
            f"the corpus of python-adamw must be the sources of {wanted} (sha256 {SHA256}), got "
            f"those of {got} (sha256 {digest}); text-adamw takes another --text"
        )
    return sources


def read(folders: Mapping[str, Path]) -> list[Source]:
    """Of {package: its folder}: the sources that somebody wrote, by their paths."""
    found = []
    for package, folder in folders.items():
        paths = {f"{package}/{p.relative_to(folder).as_posix()}": p for p in folder.rglob("*.py")}
        for name in sorted(paths.keys() - WRITTEN_BY_BUILDS):
            found.append(Source(name, paths[name].read_bytes().translate(None, DROPPED)))
    return [source for source in found if not source.is_generated()]


def windows(sources: Iterable[Source], length: int) -> dict[str, Tensor]:
    """{part: uint8 [windows, length], numbers of characters}: a part's files one after another,
    cut into windows that share no character."""
    texts: dict[str, list[bytes]] = {}
    for source in sources:
        texts.setdefault(source.part(), []).append(source.text)
    return {part: _encode(b"".join(text)).unfold(0, length, length) for part, text in texts.items()}


def _encode(text: bytes) -> Tensor:
    """Numbers of its characters, uint8."""
    return torch.from_numpy(_NUMBERS[np.frombuffer(text, dtype=np.uint8)])


_NUMBERS = np.zeros(256, dtype=np.uint8)
_NUMBERS[list(KNOWN)] = np.arange(len(KNOWN))
