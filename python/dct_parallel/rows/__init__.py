"""Rows at a cut of a model, compressed: activations forward, their gradients back.

Reading order: packing (a row's largest entries), codecs (rows as bytes, by those or in few bits),
autograd and quantizing (in few bits, between two modules), counts and transfer (what a collective
needs), all_to_all, all_gather; distinct (each row that a batch asks for, once) and bag_message
(bags of ids to the owners of their rows).
"""

from .all_gather import all_gather_rows, all_gather_rows_async
from .all_to_all import all_to_all_rows, all_to_all_rows_async
from .packing import RowPack, RowUnpack, pack_rows, row_k, unpack_rows
from .quantizing import RowDequantize, RowQuantize

__all__ = [
    "RowDequantize",
    "RowPack",
    "RowQuantize",
    "RowUnpack",
    "all_gather_rows",
    "all_gather_rows_async",
    "all_to_all_rows",
    "all_to_all_rows_async",
    "pack_rows",
    "row_k",
    "unpack_rows",
]
