"""Types of arguments: each names its rule and the value."""

import argparse
import math
from collections.abc import Callable, Collection

from dct_parallel.rows.counts import ROW_FORMATS

from .data.zipf import Zipf


def number(kind: type, allowed: Callable[[float], bool], rule: str) -> Callable:
    """An argparse type: a number for which `allowed` holds; `rule` words it."""

    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not allowed(value):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
        return value

    return parse


count = number(int, lambda n: n >= 1, "an integer >= 1")
positive = number(float, lambda x: 0 < x < math.inf, "a number > 0")
density = number(float, lambda x: 0 < x <= 1, "a number in (0, 1]")


def several(item: Callable, known: Collection[str] = ()) -> Callable:
    """An argparse type: different `item`s joined by ',', all of them `known` if any are given."""

    def parse(text: str) -> list:
        values = [item(part) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"must have no value twice, got {text!r}")
        if known and not set(values) <= set(known):
            rule = f"some of {','.join(known)}"
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
        return values

    return parse


def row_format(text: str) -> tuple[str, ...]:
    """An argparse type: one of ROW_FORMATS; or two, joined by ',', of rows and of gradients."""
    names = tuple(text.split(","))
    if len(names) > 2 or not set(names) <= set(ROW_FORMATS):
        rule = f"must be one or two of {', '.join(ROW_FORMATS)}, joined by ','"
        raise argparse.ArgumentTypeError(f"{rule}, got {text!r}")
    return names


def widths(text: str) -> list[int]:
    """An argparse type: the hidden widths of an MLP."""
    parts = text.split("-")
    if not all(part.isdecimal() and int(part) for part in parts):
        rule = "integers >= 1 joined by '-', such as 512-256"
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
    return [int(part) for part in parts]


def zipf(text: str) -> Zipf:
    """An argparse type: tables, rows of each, and the exponent of a power law."""
    try:
        tables, rows, exponent = text.split(",")
        found = Zipf(int(tables), int(rows), float(exponent))
    except ValueError:
        found = Zipf(0, 0, 0.0)
    if not (1 <= found.tables <= 100 and 3 <= found.rows < 2**31 and 1 < found.exponent < 10):
        rule = "tables in [1, 100], rows in [3, 2^31) and an exponent in (1, 10), joined by ','"
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
    return found
