"""Files of lines, and what is said of those that are malformed."""

import dataclasses
import gzip
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from ..errors import UsageError

T = TypeVar("T")
EXAMPLES = 5  # malformed lines described
GZIP = b"\x1f\x8b"  # how such files begin


@dataclasses.dataclass
class ReadReport:
    """How reading went: good rows, malformed lines, and the first of these as (line, reason)."""

    rows: int = 0
    malformed: int = 0
    examples: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def add_malformed(self, line: int, reason: str) -> None:
        """Count a line, numbered from 1."""
        self.malformed += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append((line, reason))

    @staticmethod
    def merge(reports: "Sequence[ReadReport]") -> "ReadReport":
        """The report on a whole file from those on its parts."""
        return ReadReport(
            sum(report.rows for report in reports),
            sum(report.malformed for report in reports),
            sorted(example for report in reports for example in report.examples)[:EXAMPLES],
        )

    @property
    def lines(self) -> int:
        return self.rows + self.malformed

    def describe(self) -> str:
        """The malformed lines: how many, and the first of them."""
        examples = "; ".join(f"line {line}: {reason}" for line, reason in self.examples)
        return f"{self.malformed:,} of {self.lines:,} lines malformed ({examples})"


def opened(path: Path) -> BinaryIO:
    """A file of lines, gzip-compressed or not, whatever its name; UsageError if it is none."""
    if not guarded(path, path.is_file):
        raise UsageError(f"{path} must be a file, got {'a folder' if path.is_dir() else 'nothing'}")
    with guarded(path, lambda: open(path, "rb")) as file:
        compressed = file.read(len(GZIP)) == GZIP
    return guarded(path, lambda: (gzip.open if compressed else open)(path, "rb"))


def guarded(path: Path, operation: Callable[[], T]) -> T:
    """What `operation` on the file returns; UsageError if it cannot be read."""
    try:
        return operation()
    except (OSError, EOFError, zlib.error) as error:  # gzip raises all three
        raise UsageError(f"{path} must be readable to its end, got: {error}") from error
