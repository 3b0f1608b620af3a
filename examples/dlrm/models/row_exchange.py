"""How pooled embeddings get from the ranks that own tables to the ranks that own samples."""

import argparse
from collections.abc import Callable
from functools import partial

from dct_parallel import RowFormat, all_to_all_rows
from dct_parallel.rows.all_to_all import RowExchange


def rows_in(format: str | RowFormat) -> RowExchange:
    """Exchange rows in a format of `all_to_all_rows`."""
    return partial(all_to_all_rows, format=format)


def _dct(options: argparse.Namespace) -> RowExchange:
    if options.row_format is not None:
        return rows_in(RowFormat(*options.row_format))
    return rows_in(RowFormat("bfloat16", density=options.row_density))


# Keys are names of MODES: rows and gradients use the same number format.
EXCHANGES: dict[str, Callable[[argparse.Namespace], RowExchange]] = {
    "dense": lambda options: rows_in("float32"),
    "bf16": lambda options: rows_in("bfloat16"),
    "powersgd": lambda options: rows_in("float32"),
    "dct": _dct,
}
