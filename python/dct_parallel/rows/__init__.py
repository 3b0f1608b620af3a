"""Rows at a cut of a model, compressed: activations forward, their gradients back.

Reading order: packing (rows into values and positions, and back), messages and counts (what a
collective needs), all_to_all, all_gather.
"""

from .all_gather import all_gather_rows
from .all_to_all import all_to_all_rows
from .packing import RowPack, RowUnpack, pack, row_k, unpack

__all__ = [
    "RowPack",
    "RowUnpack",
    "all_gather_rows",
    "all_to_all_rows",
    "pack",
    "row_k",
    "unpack",
]
