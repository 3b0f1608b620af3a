"""Tables of Markdown, and the formats of their figures."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without the columns that are empty in every row."""
    rows = [list(row) for row in rows]
    kept = [n for n in range(len(headings)) if n == 0 or any(row[n] for row in rows)]
    lines = [header([headings[n] for n in kept])]
    return "\n".join([*lines, *(line([row[n] for n in kept]) for row in rows)])


def header(headings: Sequence[str]) -> str:
    """The first two lines of a table."""
    return f"{line(headings)}\n{line(['---'] * len(headings))}"


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def aligned(text: str) -> str:
    """The text with all columns of its tables as wide as their widest cell."""
    lines = [line.split("|") for line in text.splitlines()]
    found = []
    for is_table, block in itertools.groupby(lines, lambda cells: len(cells) > 1):
        block = list(block)
        if is_table:
            widths = [max(map(len, column)) for column in zip(*block, strict=True)]
            for cells in block:
                fill = "-" if set("".join(cells)) <= set("- ") else " "
                inner = zip(cells[1:-1], widths[1:-1], strict=True)
                found.append(
                    "|" + "|".join(f" {c.strip():{fill}<{w - 2}} " for c, w in inner) + "|"
                )
        else:
            found += [cells[0] for cells in block]
    return "\n".join(found)


def mean(values: Sequence[float], digits: int = 4) -> str:
    """With the standard deviation."""
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def difference(values: Sequence[float], digits: int = 4) -> str:
    """Its mean with the standard error."""
    if not values:
        return ""
    error = ""
    if len(values) > 1:
        error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"
    return f"{statistics.mean(values):+.{digits}f}{error}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def times(value: float) -> str:
    return f"{value:,.1f}x" if value < 1000 else f"{value:,.0f}x"
