"""The task of dp_density.py on Python sources: the installed ones of torch and sympy.

They are a text of 70 million characters that no method was tuned for, and that needs no download.
Only printable ASCII and line ends are kept. Generated files are left out.
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
KNOWN = b"\n" + bytes(range(ord(" "), ord("~") + 1))  # characters, by their numbers
DROPPED = bytes(set(range(256)) - set(KNOWN))
LONGEST_LINE, MOST_DIGITS = 80, 0.2  # of a file written by hand: mean line, share of digits
PARTS = {0: "validation", 1: "test"}  # one in 32 files each, by a hash of the path
VALIDATION_TEXTS = 4000  # enough to choose by: differences vary less than losses. All of test are.
SCORED_AT_ONCE = 32  # texts; more of them leave the cache


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
    """The sources of PACKAGES.

    Raises:
        UsageError: a package is not installed.
    """
    specs = {name: find_spec(name) for name in PACKAGES}
    if lacking := [name for name, spec in specs.items() if spec is None]:
        raise UsageError(f"problems python-... need {' and '.join(lacking)}: pip install them")
    return read({name: Path(spec.origin).parent for name, spec in specs.items()})


def read(folders: Mapping[str, Path]) -> list[Source]:
    """The sources in {package: its folder} that were written by hand, by their paths."""
    found = []
    for package, folder in folders.items():
        paths = {f"{package}/{p.relative_to(folder).as_posix()}": p for p in folder.rglob("*.py")}
        for name in sorted(paths):
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


class PythonTask:
    """Next characters of the sources. No character is read twice.

    Args:
        width, layers: of the transformer.
        batch: texts of a rank and step.
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
        raise UsageError(f"--steps must end before a rank's {len(order)} texts, each read once, do")

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return next_character_loss(model, batch)

    @torch.no_grad()
    def score(self, model: nn.Module, part: str) -> dict[str, float]:
        """{"loss": nats per character}."""
        batches = self._scored[part].split(SCORED_AT_ONCE)
        losses = [self.loss(model, batch.long()).item() * len(batch) for batch in batches]
        return {"loss": sum(losses) / len(self._scored[part])}


def _spread(texts: Tensor, count: int) -> Tensor:
    """`count` of the texts, at equal distances."""
    return texts[torch.arange(count) * len(texts) // count]
