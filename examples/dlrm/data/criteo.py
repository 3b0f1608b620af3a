"""Reads Criteo's layout: tab-separated lines of a label, 13 integers and 26 categoricals.

An empty field is a missing value. A categorical that is not a hexadecimal number is replaced by its
CRC-32, which is equal on all machines and ranks.
"""

import contextlib
import gzip
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from ..errors import UsageError
from .features import INTS, TABLES, Rows

FIELDS = 1 + INTS + TABLES
LINES_PER_CHUNK = 65536
FIRST_LINE_BYTES = 2**16  # a binary file may have no line end
_GZIP = b"\x1f\x8b"  # the first bytes of a gzip file


class ReadReport(NamedTuple):
    """Counts of rows and malformed lines, and (line, reason) of the first malformed line."""

    rows: int
    malformed: int
    first: tuple[int, str] | None

    @staticmethod
    def merge(reports: "Sequence[ReadReport]") -> "ReadReport":
        """Merge the reports of all ranks into one report on the whole file."""
        rows, malformed, first = zip(*reports, strict=True)
        return ReadReport(sum(rows), sum(malformed), min(filter(None, first), default=None))

    def describe(self) -> str:
        """Describe the number of malformed lines, and why the first one is malformed."""
        line, reason = self.first
        lines = self.rows + self.malformed
        return f"{self.malformed:,} of {lines:,} lines malformed (line {line}: {reason})"


def check_file(path: Path) -> None:
    """Raise an error if the file cannot be used, before the work starts."""
    with _readable(path), _opened(path) as file:
        first = file.readline(FIRST_LINE_BYTES)
    if not first:
        raise UsageError(f"{path} must have rows, got an empty file")
    if b"\t" not in first and first.count(b",") == FIELDS - 1:
        raise UsageError(f"{path} must be tab-separated, got a line that looks comma-separated")


def read(
    path: Path, table_rows: Sequence[int] | None, rank: int = 0, world_size: int = 1
) -> tuple[Rows, np.ndarray, ReadReport]:
    """Encode every world_size-th line, starting at line `rank` (lines are counted from 0).

    Every rank reads the whole file but parses only its own lines, 65,536 at a time. Encoded rows
    use 157 bytes of memory each, and temporarily twice as much.

    Args:
        path: a tsv file, gzip-compressed or not.
        table_rows: number of rows of each embedding table. If None, ids are hashes of values.

    Returns:
        The rows, their line numbers (int64, from 0), and a report on this rank's lines.
    """
    malformed, first = 0, None
    parts: list[Rows] = [_encode([], table_rows)]
    numbers: list[int] = []
    number = rank
    with _readable(path), _opened(path) as file:
        lines_of_rank = islice(file, rank, None, world_size)
        while lines := list(islice(lines_of_rank, LINES_PER_CHUNK)):
            parsed = []
            for line in lines:
                try:
                    parsed.append(parse_line(line))
                except ValueError as error:
                    malformed, first = malformed + 1, first or (number + 1, str(error))
                else:
                    numbers.append(number)
                number += world_size
            parts.append(_encode(parsed, table_rows))
    report = ReadReport(len(numbers), malformed, first)
    return Rows.concatenate(parts), np.array(numbers, dtype=np.int64), report


def parse_line(line: bytes) -> list[int]:
    """Parse a line into its label, 13 integers and 26 categoricals; missing values are -1."""
    fields = line.rstrip(b"\r\n").split(b"\t")
    if len(fields) != FIELDS:
        raise ValueError(f"must have {FIELDS} fields, got {len(fields)}")
    if fields[0] not in (b"0", b"1"):
        raise ValueError(f"label must be 0 or 1, got {_shown(fields[0])}")
    row = [int(fields[0])]
    for position, field in enumerate(fields[1 : 1 + INTS], start=1):
        try:
            # Clamp to fit in int64. Negative values are equivalent in log(1 + max(x, 0)).
            row.append(min(max(int(field), -1), 2**62) if field else -1)
        except ValueError:
            raise ValueError(f"field {position} must be an integer, got {_shown(field)}") from None
    row += [token_value(field) if field else -1 for field in fields[1 + INTS :]]
    return row


def token_value(token: bytes) -> int:
    """Return a number in [0, 2^63): the token's value if it is hexadecimal, else its CRC-32."""
    try:
        return int(token, 16) % 2**63
    except ValueError:
        return zlib.crc32(token)


def _encode(parsed: list[list[int]], table_rows: Sequence[int] | None) -> Rows:
    table = np.array(parsed, dtype=np.int64).reshape(-1, FIELDS)
    return Rows.encode(table[:, 0], table[:, 1 : 1 + INTS], table[:, 1 + INTS :], table_rows)


def _opened(path: Path) -> BinaryIO:
    """Open the file. If its content is gzip-compressed, decompress it. The name has no effect."""
    if not path.is_file():
        got = "a folder" if path.is_dir() else "a path that does not exist"
        raise UsageError(f"{path} must be a file, got {got}")
    with open(path, "rb") as file:
        compressed = file.read(len(_GZIP)) == _GZIP
    return (gzip.open if compressed else open)(path, "rb")


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert errors while reading to UsageError."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:  # gzip raises all three
        raise UsageError(f"{path} must be readable to its end, got: {error}") from error


def _shown(field: bytes) -> str:
    return repr(field[:20].decode(errors="replace"))
