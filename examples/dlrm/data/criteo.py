"""Reads Criteo's own layout: tab-separated lines of a label, 13 integers and 26 categoricals.

Empty fields are missing values. A categorical is read as a hexadecimal number, as Criteo hashed it;
any other text becomes its CRC-32. So the same token is the same number on every machine and rank.
"""

import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import UsageError
from .features import INTS, TABLES, Rows
from .lines import ReadReport, guarded, opened

FIELDS = 1 + INTS + TABLES
LINES_PER_CHUNK = 65536
FIRST_LINE_BYTES = 2**16  # at most: what is no text may have no line


def check_file(path: Path) -> None:
    """Fail early on a file that can never be read.

    Raises:
        UsageError: it is absent, not readable, empty or comma-separated.
    """
    with opened(path) as file:
        first = guarded(path, lambda: file.readline(FIRST_LINE_BYTES))
    if not first:
        raise UsageError(f"{path} must have rows, got an empty file")
    if b"\t" not in first and first.count(b",") == FIELDS - 1:
        raise UsageError(f"{path} must be tab-separated, got a line that looks comma-separated")


def read(
    path: Path, table_rows: Sequence[int] | None, rank: int = 0, world_size: int = 1
) -> tuple[Rows, np.ndarray, ReadReport]:
    """Encode every world_size-th line, from line `rank` on (lines counted from 0).

    Streams the file, 65,536 lines at a time: what stays in memory is 157 bytes per encoded row, for
    a moment twice that. Every rank reads the whole file but parses only its own lines.

    Args:
        path: a tsv file, gzip-compressed or not.
        table_rows: of each embedding table; None to name values instead.

    Returns:
        The rows, their line numbers (int64, from 0), and a report on this rank's lines.

    Raises:
        UsageError: the file cannot be opened or unpacked. Malformed lines are reported only.
    """
    report = ReadReport()
    parts: list[Rows] = [_encode([], table_rows)]
    numbers: list[int] = []
    with opened(path) as file:
        for first, lines in _chunks(path, file):
            parsed = []
            for offset in range((rank - first) % world_size, len(lines), world_size):
                try:
                    parsed.append(parse_line(lines[offset]))
                except ValueError as error:
                    report.add_malformed(first + offset + 1, str(error))
                else:
                    numbers.append(first + offset)
            parts.append(_encode(parsed, table_rows))
    report.rows = len(numbers)
    return Rows.concatenate(parts), np.array(numbers, dtype=np.int64), report


def parse_line(line: bytes) -> list[int]:
    """Label, 13 integers, 26 categoricals of one line; -1 where missing.

    Raises:
        ValueError: the line is malformed; the text says why.
    """
    fields = line.rstrip(b"\r\n").split(b"\t")
    if len(fields) != FIELDS:
        raise ValueError(f"must have {FIELDS} fields, got {len(fields)}")
    if fields[0] not in (b"0", b"1"):
        raise ValueError(f"label must be 0 or 1, got {_shown(fields[0])}")
    row = [int(fields[0])]
    for position, field in enumerate(fields[1 : 1 + INTS], start=1):
        try:
            # log(1 + x) cannot tell larger ones apart; negative ones are 0 to it.
            row.append(min(max(int(field), -1), 2**62) if field else -1)
        except ValueError:
            raise ValueError(f"field {position} must be an integer, got {_shown(field)}") from None
    row += [token_value(field) if field else -1 for field in fields[1 + INTS :]]
    return row


def token_value(token: bytes) -> int:
    """A categorical as a number in [0, 2^63): its value if it is hexadecimal, else its CRC-32."""
    try:
        return int(token, 16) % 2**63
    except ValueError:
        return zlib.crc32(token)


def _encode(parsed: list[list[int]], table_rows: Sequence[int] | None) -> Rows:
    table = np.array(parsed, dtype=np.int64).reshape(-1, FIELDS)
    return Rows.encode(table[:, 0], table[:, 1 : 1 + INTS], table[:, 1 + INTS :], table_rows)


def _chunks(path: Path, file: BinaryIO) -> Iterator[tuple[int, list[bytes]]]:
    """(number of its first line, lines) of each chunk."""
    first = 0
    while lines := guarded(path, lambda: list(islice(file, LINES_PER_CHUNK))):
        yield first, lines
        first += len(lines)


def _shown(field: bytes) -> str:
    return repr(field[:20].decode(errors="replace"))
