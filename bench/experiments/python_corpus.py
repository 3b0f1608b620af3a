"""The installed Python sources of torch and sympy, as a corpus.

A text of 70 million characters that no method was tuned for, and that needs no download. Only
printable ASCII and line ends are kept. Generated files are left out.
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
LONGEST_LINE, MOST_DIGITS = 80, 0.2  # of a file written by hand: mean line, share of digits
PARTS = {0: "validation", 1: "test"}  # one in 32 files each, by a hash of the path


class Source(NamedTuple):
    """A file: its path, which begins with the package, and its text."""

    path: str
    text: bytes

    def part(self) -> str:
        return PARTS.get(zlib.crc32(self.path.encode()) % 32, "train")

    def is_generated(self) -> bool:
        """Whether it consists of numbers or very long lines, as generated files do."""
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
    """The sources in {package: its folder} that were written by hand, by their paths."""
    found = []
    for package, folder in folders.items():
        paths = {f"{package}/{p.relative_to(folder).as_posix()}": p for p in folder.rglob("*.py")}
        for name in sorted(paths.keys() - WRITTEN_BY_BUILDS):
            found.append(Source(name, paths[name].read_bytes().translate(None, DROPPED)))
    return [source for source in found if not source.is_generated()]


def windows(sources: Iterable[Source], length: int) -> dict[str, Tensor]:
    """{part: uint8 [windows, length], numbers of characters}. The files of a part are concatenated
    and cut into windows that share no character."""
    texts: dict[str, list[bytes]] = {}
    for source in sources:
        texts.setdefault(source.part(), []).append(source.text)
    return {part: _encode(b"".join(text)).unfold(0, length, length) for part, text in texts.items()}


def _encode(text: bytes) -> Tensor:
    """The numbers of the characters, uint8."""
    return torch.from_numpy(_NUMBERS[np.frombuffer(text, dtype=np.uint8)])


_NUMBERS = np.zeros(256, dtype=np.uint8)
_NUMBERS[list(KNOWN)] = np.arange(len(KNOWN))
