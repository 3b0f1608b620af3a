"""The Python task of dp_density.py: next-character prediction on the sources of torch and sympy.

The installed sources have 70 million characters and need no download. No method was tuned on them.
Only printable ASCII characters and line ends are used. Generated files are skipped.
"""

import zlib
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bench.cli import UsageError

from .dp_tasks import BATCH_TEXTS, CONTEXT, Transformer, next_character_loss

PACKAGES = ("torch", "sympy")
KNOWN = b"\n" + bytes(range(ord(" "), ord("~") + 1))  # the model's inputs are indices into KNOWN
DROPPED = bytes(set(range(256)) - set(KNOWN))
LONGEST_LINE, MOST_DIGITS = 80, 0.2  # limits of the mean line length and the fraction of digits
PARTS = {0: "validation", 1: "test"}  # a hash of the path selects 1 of 32 files for each part
VALIDATION_TEXTS = 4000  # enough to select a learning rate
SCORED_AT_ONCE = 32  # texts; a larger batch would not fit into the cache


class Source(NamedTuple):
    """A source file. `path` starts with the name of the package."""

    path: str
    text: bytes

    def part(self) -> str:
        return PARTS.get(zlib.crc32(self.path.encode()) % 32, "train")

    def is_generated(self) -> bool:
        """Whether the file counts as generated: its mean line is long, or many bytes are digits."""
        lines = 1 + self.text.count(b"\n")
        digits = sum(self.text.count(digit) for digit in b"0123456789")
        return len(self.text) > LONGEST_LINE * lines or digits > MOST_DIGITS * len(self.text)


def installed() -> list[Source]:
    """The source files of PACKAGES.

    Raises:
        UsageError: a package is not installed.
    """
    specs = {name: find_spec(name) for name in PACKAGES}
    if lacking := [name for name, spec in specs.items() if spec is None]:
        raise UsageError(f"python-... needs {' and '.join(lacking)}: use pip install")
    return read({name: Path(spec.origin).parent for name, spec in specs.items()})


def read(folders: Mapping[str, Path]) -> list[Source]:
    """The handwritten files in `folders` ({package: folder}), sorted by path."""
    found = []
    for package, folder in folders.items():
        paths = {f"{package}/{p.relative_to(folder).as_posix()}": p for p in folder.rglob("*.py")}
        for name in sorted(paths):
            found.append(Source(name, paths[name].read_bytes().translate(None, DROPPED)))
    return [source for source in found if not source.is_generated()]


def windows(sources: Iterable[Source], length: int) -> dict[str, Tensor]:
    """{part: indices of characters, uint8 [windows, length]}; windows do not overlap."""
    texts: dict[str, list[bytes]] = {}
    for source in sources:
        texts.setdefault(source.part(), []).append(source.text)
    return {part: _encode(b"".join(text)).unfold(0, length, length) for part, text in texts.items()}


def _encode(text: bytes) -> Tensor:
    """The indices of the characters in KNOWN, uint8."""
    return torch.from_numpy(_NUMBERS[np.frombuffer(text, dtype=np.uint8)])


_NUMBERS = np.zeros(256, dtype=np.uint8)
_NUMBERS[list(KNOWN)] = np.arange(len(KNOWN))


class PythonTask:
    """Next-character prediction on the sources. Each character is used at most once.

    Args:
        width, layers: the width of the transformer and its number of layers.
        batch: texts per rank and step.
    """

    def __init__(self, width: int = 96, layers: int = 3, batch: int = BATCH_TEXTS) -> None:
        texts = windows(installed(), CONTEXT + 1)
        self._train = texts["train"]
        self._scored = {
            "validation": _spread(texts["validation"], VALIDATION_TEXTS),
            "test": texts["test"],
        }
        self._make = lambda: Transformer(len(KNOWN), width, layers)
        self._batch = batch

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self._make()

    def batches(self, seed: int, rank: int, ranks: int):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self._train), generator=generator)[rank::ranks]
        for index in order.split(self._batch):
            yield self._train[index].long()
        raise UsageError(f"--steps must use at most the {len(order)} texts of a rank")

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return next_character_loss(model, batch)

    @torch.no_grad()
    def score(self, model: nn.Module, part: str) -> dict[str, float]:
        """{"loss": nats per character}."""
        batches = self._scored[part].split(SCORED_AT_ONCE)
        losses = [self.loss(model, batch.long()).item() * len(batch) for batch in batches]
        return {"loss": sum(losses) / len(self._scored[part])}


def _spread(texts: Tensor, count: int) -> Tensor:
    """Select `count` evenly spaced texts."""
    return texts[torch.arange(count) * len(texts) // count]
