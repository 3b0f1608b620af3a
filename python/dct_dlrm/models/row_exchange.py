"""How pooled embeddings get from the ranks that own tables to those that own samples."""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from dct_parallel import all_to_all_rows
from dct_parallel.rows.all_to_all import Exchange


def every_entry(forward: str, backward: str) -> Exchange:
    """Every entry crosses, in a number format for each way: see `all_to_all_rows`."""
    return partial(all_to_all_rows, forward=forward, backward=backward)


def largest_entries(density: float, value_dtype: torch.dtype = torch.bfloat16) -> Exchange:
    """DCT-MP: of a row its largest entries cross, and their gradients, in `value_dtype`."""
    return partial(all_to_all_rows, density=density, value_dtype=value_dtype)


def _dct(options: argparse.Namespace) -> Exchange:
    if options.mp_format is not None:
        return every_entry(*options.mp_format)
    return largest_entries(options.mp_density)


# By mode of the gradients' exchange: both use the same number format.
EXCHANGES: dict[str, Callable[[argparse.Namespace], Exchange]] = {
    "dense": lambda options: every_entry("float32", "float32"),
    "bf16": lambda options: every_entry("bfloat16", "bfloat16"),
    "powersgd": lambda options: every_entry("float32", "float32"),
    "dct": _dct,
}
