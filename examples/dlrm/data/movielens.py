"""Reads MovieLens 100K's u.data: tab-separated lines of a user, an item, a rating and a time.

A row is a rating: its label is whether the user liked the item, its features are the user, the item
and the items that this user liked before, a bag of up to 20; its two integers are how many ratings
the user gave before and the item got. So no row knows of what came after it.
"""

from collections import Counter, defaultdict, deque
from pathlib import Path

import numpy as np

from .features import EMPTY, Rows
from .lines import ReadReport, guarded, opened

LIKED = 4  # of 5, and above
HISTORY = 20  # items liked last
FIELDS = ("user", "item", "rating", "time")


def read(
    path: Path, hash_size: int | None, rank: int = 0, world_size: int = 1
) -> tuple[Rows, np.ndarray, tuple[int, ...] | None, ReadReport]:
    """Encode every world_size-th line, from line `rank` on (lines counted from 0).

    Every rank reads and keeps the whole file for that: a row depends on the user's others.

    Args:
        path: a tsv file, gzip-compressed or not.
        hash_size: rows of an embedding table at most; None to name values instead.

    Returns:
        The rows, of tables of users, items and liked items; their line numbers (int64, from 0); the
        rows of each table; and a report on this rank's lines.

    Raises:
        UsageError: the file cannot be opened or unpacked. Malformed lines are reported only.
    """
    report = ReadReport()
    ratings = []  # (time, line, user, item, liked)
    with opened(path) as file:
        for number, line in enumerate(guarded(path, file.readlines)):
            try:
                user, item, rating, time = parse_line(line)
            except ValueError as error:
                if number % world_size == rank:
                    report.add_malformed(number + 1, str(error))
            else:
                ratings.append((time, number, user, item, rating >= LIKED))
    numbers, labels, ints, values = _with_history(sorted(ratings), rank, world_size)
    report.rows = len(numbers)
    tables = hash_size and _table_rows(ratings, hash_size)
    return Rows.encode(labels, ints, values, tables), numbers, tables, report


def parse_line(line: bytes) -> list[int]:
    """User, item, rating and time of one line, integers from 0.

    Raises:
        ValueError: the line is malformed; the text says why.
    """
    fields = line.split()
    if len(fields) != len(FIELDS):
        raise ValueError(f"must have {len(FIELDS)} fields, got {len(fields)}")
    for name, field in zip(FIELDS, fields, strict=True):
        if not field.isdigit() or len(field) > 18:
            got = repr(field[:20].decode(errors="replace"))
            raise ValueError(f"{name} must be an integer from 0, got {got}")
    return [int(field) for field in fields]


def _with_history(
    ratings: list[tuple], rank: int, world_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Numbers, labels, integers and bags of values of this rank's lines, in their order."""
    liked: dict[int, deque] = defaultdict(lambda: deque(maxlen=HISTORY))
    of_user, of_item, rows = Counter(), Counter(), []
    for _, number, user, item, likes in ratings:
        if number % world_size == rank:
            rows.append(
                (number, int(likes), of_user[user], of_item[item], user, item, *liked[user])
            )
        of_user[user] += 1
        of_item[item] += 1
        if likes:
            liked[user].append(item)
    rows.sort()
    values = np.full((len(rows), 3, HISTORY), EMPTY, dtype=np.int64)
    for index, (_, _, _, _, user, item, *history) in enumerate(rows):
        values[index, 0, 0], values[index, 1, 0] = user, item
        values[index, 2, : len(history)] = history
    table = np.array([row[:4] for row in rows], dtype=np.int64).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2:], values


def _table_rows(ratings: list[tuple], hash_size: int) -> tuple[int, ...]:
    """One row per value, the missing one's beside them, at most `hash_size`."""
    users = max((rating[2] for rating in ratings), default=0) + 2
    items = max((rating[3] for rating in ratings), default=0) + 2
    return tuple(min(count, hash_size) for count in (users, items, items))
