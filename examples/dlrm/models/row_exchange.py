"""Sends pooled embeddings from the ranks that own tables to the ranks that own samples."""

import argparse
from functools import partial

from dct_parallel import RowFormat, all_to_all_rows
from dct_parallel.rows.all_to_all import RowExchange


def rows_in(format: str | RowFormat) -> RowExchange:
    """Return a function that exchanges rows in a format of `all_to_all_rows`."""
    return partial(all_to_all_rows, format=format)


def row_format(mode: str, options: argparse.Namespace) -> str | RowFormat:
    """The row format to use with a gradient mode (--modes)."""
    if mode != "dct":
        return "bfloat16" if mode == "bf16" else "float32"
    if options.row_format is not None:
        return RowFormat(*options.row_format)
    return RowFormat("bfloat16", density=options.row_density)
