"""row_unpack: unpacks rows to dense rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..row_layout import position_encoding
from . import _rows
from ._launch import launch
from ._numeric import round_to, to_float


@triton.jit(do_not_specialize=["rows"])
def _bitmap_kernel(
    values, positions, out, rows, width, k,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = _rows.rows_of_program(ROWS)
    before = tl.zeros([ROWS, 1], tl.int32)  # bits in earlier tiles of the row
    for tile in range(TILES):
        start = tile * BLOCK
        slot, before = _rows.load_slots(positions, row, rows, start, width, before, BLOCK)
        accepted = (slot >= 0) & (slot < k)
        elements = to_float(tl.load(values + row * k + slot, mask=accepted, other=0))
        elements = round_to(elements, out.dtype.element_ty)
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < width)
        tl.store(out + row * width + column, elements, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _list_kernel(
    values, positions, out, rows, width, k,
    COLUMN_BYTES: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = _rows.rows_of_program(ROWS)
    for tile in range(TILES):
        column = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < width)
        zeros = tl.zeros([ROWS, BLOCK], out.dtype.element_ty)
        tl.store(out + row * width + column, zeros, mask=inside)
    tl.debug_barrier()  # orders the zeros before the values; the row is still in the cache
    slot = tl.arange(0, SLOTS)[None, :]
    column = _rows.load_columns(positions, row, rows, slot, width, k, COLUMN_BYTES)
    elements = to_float(tl.load(values + row * k + slot, mask=column >= 0, other=0))
    elements = round_to(elements, out.dtype.element_ty)
    tl.store(out + row * width + column, elements, mask=column >= 0)


def row_unpack(values: Tensor, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    rows, k = values.shape
    out = values.new_empty(rows, width, dtype=dtype)
    column_bytes = _rows.COLUMN_BYTES[position_encoding(width, k)]
    tiles = _rows.tiles(width)
    constants = {"ROWS": tiles.rows, "BLOCK": tiles.block, "TILES": tiles.count}
    kernel = _bitmap_kernel
    if column_bytes > 0:
        kernel = _list_kernel
        constants |= {"SLOTS": triton.next_power_of_2(k), "COLUMN_BYTES": column_bytes}
    launch(
        kernel,
        triton.cdiv(rows, tiles.rows),
        *(values, positions, out, rows, width, k),
        **constants,
        device=values.device,
        num_warps=tiles.num_warps,
    )
    return out
