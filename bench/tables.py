"""Formats Markdown tables and their figures."""

import math
import statistics
from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with padded cells. Columns whose cells are all empty are omitted."""
    columns = list(zip(headings, *rows, strict=True))
    kept = [each for n, each in enumerate(columns) if n == 0 or any(each[1:])]
    widths = [max(3, *map(len, each)) for each in kept]
    padded = [[cell.ljust(w) for cell in each] for each, w in zip(kept, widths, strict=True)]
    first, *rest = map(line, zip(*padded, strict=True))
    return "\n".join([first, line("-" * width for width in widths), *rest])


def header(headings: Sequence[str]) -> str:
    """The first two lines of a table: headings and separator."""
    return f"{line(headings)}\n{line(['---'] * len(headings))}"


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def mean(values: Sequence[float]) -> str:
    """The mean of the values with their standard deviation."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def difference(values: Sequence[float]) -> str:
    """The mean of differences with its standard error."""
    if len(values) < 2:
        return "".join(f"{value:+.4f}" for value in values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):+.4f} ± {error:.4f}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def times(value: float) -> str:
    return f"{value:,.1f}x" if value < 1000 else f"{value:,.0f}x"
